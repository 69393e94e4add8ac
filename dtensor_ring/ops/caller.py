"""Where a call stands in the code of the user: two of one shape, in another order, differ in it."""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class _Caller(local):
    place = ""


CALLER = _Caller()
"""The place of this thread's call; empty if it is not known, as in a compiled graph."""

_WITHIN = "torch.", "dtensor_ring."


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
    finally:
        CALLER.place = ""
