"""Records the user's source line, the layer and the placements of each call.

Ranks compare them, to distinguish calls of the same shape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import local
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from dtensor_ring.agreement.call_record import CallSite

T = TypeVar("T")


class _Caller(local):
    line = ""
    layer = ""
    placements = ""

    @property
    def site(self) -> CallSite:
        """Where the call is made, as ranks compare it."""
        return CallSite(self.line, self.layer, self.placements)


# What is known of this thread's call. Empty if unknown, as in a compiled graph.
CALLER = _Caller()

_WITHIN = "torch.", "dtensor_ring."
# The attribute of a module that holds its name. Copies of a model keep it.
_NAME = "dtensor_ring_layer"


def line_of(frame: FrameType | None) -> str:
    """Return the user's line that called a frame, without folders, which differ by host."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_WITHIN):
        frame = frame.f_back
    # Generated code has no file, and its number differs by process.
    if frame is None or frame.f_code.co_filename.startswith("<"):
        return ""
    file = frame.f_code.co_filename.rpartition("/")[2]
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"


def called_from(frame: FrameType, run: Callable[..., T], *arguments: Any) -> T:
    """Call `run` while `CALLER` holds the place that called the frame."""
    CALLER.line = line_of(frame)
    try:
        return run(*arguments)
    except BaseException:
        CALLER.layer = ""  # after an error, no forward hook of the layer resets it
        raise
    finally:
        CALLER.line = CALLER.placements = ""


def called_by_user(run: Callable[..., T], *arguments: Any) -> T:
    """Call `run`; outside of a compiler, while `CALLER` holds the user's line."""
    if torch.compiler.is_compiling():
        return run(*arguments)
    return called_from(sys._getframe(), run, *arguments)


def name_layer(module: nn.Module, name: str) -> None:
    """Name a module that attends. The name must be the same on all ranks."""
    setattr(module, _NAME, name)


def layer_of(module: nn.Module) -> str:
    """Return the name of a module, empty if it has none."""
    return getattr(module, _NAME, "")


def within_layer(module: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which `CALLER` holds the name of a module.

    Compiled code has none: a name in the graph would compile each layer separately.
    """
    return nullcontext() if torch.compiler.is_compiling() else _WithinLayer(module)


class _WithinLayer:
    """The context of `within_layer`; a class is faster than a generator."""

    def __init__(self, module: nn.Module) -> None:
        self._layer = layer_of(module)

    def __enter__(self) -> None:
        self._before, CALLER.layer = CALLER.layer, self._layer

    def __exit__(self, *error: object) -> None:
        CALLER.layer = self._before
