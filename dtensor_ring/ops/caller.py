"""Where a call stands: the line and the layer by which ranks tell calls of one shape apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import local
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from dtensor_ring.agreement.record import Where

T = TypeVar("T")


class _Caller(local):
    place = ""
    layer = ""

    @property
    def where(self) -> Where:
        """Both of them, as ranks compare them."""
        return Where(self.place, self.layer)


CALLER = _Caller()
"""The place and the layer of this thread's call; empty if not known, as in a compiled graph."""

_WITHIN = "torch.", "dtensor_ring."
_NAME = "dtensor_ring_layer"
"""The attribute in which a module keeps its name, so that copies of a model have it, too."""


def place_of(frame: FrameType | None) -> str:
    """The line of the user that a frame was called from, as its file has it on every host."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_WITHIN):
        frame = frame.f_back
    # Code without a file is generated, and numbered by process.
    if frame is None or frame.f_code.co_filename.startswith("<"):
        return ""
    file = frame.f_code.co_filename.rpartition("/")[2]
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"


def called_from(frame: FrameType, run: Callable[..., T], *arguments: Any) -> T:
    """The result of `run`, during which `CALLER` has the place that a frame was called from."""
    CALLER.place = place_of(frame)
    try:
        return run(*arguments)
    except BaseException:
        CALLER.layer = ""  # no hook after the layer's forward comes to it
        raise
    finally:
        CALLER.place = ""


def name_layer(module: nn.Module, name: str) -> None:
    """Give a module that attends a name, which is the same on all ranks."""
    setattr(module, _NAME, name)


def layer_of(module: nn.Module) -> str:
    """The name of a module, empty if it has none."""
    return getattr(module, _NAME, "")


def within_layer(module: nn.Module) -> AbstractContextManager[object]:
    """A context in which `CALLER` has the name of a module, if it has one.

    A compiler does not see it: the graph of one layer would be no graph of another one.
    """
    return nullcontext() if torch.compiler.is_compiling() else _WithinLayer(module)


class _WithinLayer:
    """The context itself; one made of a generator would take longer."""

    def __init__(self, module: nn.Module) -> None:
        self._layer = layer_of(module)

    def __enter__(self) -> None:
        self._before, CALLER.layer = CALLER.layer, self._layer

    def __exit__(self, *error: object) -> None:
        CALLER.layer = self._before
