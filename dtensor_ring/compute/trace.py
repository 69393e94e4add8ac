"""Labels the steps of a ring in a profiler's trace. Without a profiler, labels do nothing.

A dry run computes nothing: its tensors are on the meta device. What would read and write memory
there is noted here, for whoever counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch.autograd import profiler


class _Nothing:
    """A context that does nothing; a ring of two ranks enters twenty of them in a call."""

    # A function of C that takes anything, whose result is false: errors pass. `nullcontext` has two
    # functions of Python, which cost more than all else here.
    __enter__ = __exit__ = "".format


NOTHING: Any = _Nothing()


class Label(NamedTuple):
    """A step of a ring, for a profile.

    Attributes:
        ring: `"forward"` or `"backward"`.
        step: number of the step, from 0.
        source: the rank whose keys and values the step uses.
    """

    ring: str
    step: int
    source: int

    def __call__(self, what: str) -> AbstractContextManager[Any]:
        """Return a context that records its body as `what`: `with label("tile"): ...`."""
        # Return early: building the string would cost more than all else here.
        if not profiler._is_profiler_enabled:
            return NOTHING
        return profiler.record_function(
            f"ring {self.ring}, step {self.step}, source {self.source}: {what}"
        )


# Takes what a pass over memory is, "packet", "pack", "unpack", "merge" or "add", and the bytes that
# it reads and writes.
Note = Callable[[str, int], None]


class DryRun(NamedTuple):
    """Who counts a dry run.

    Attributes:
        note: takes each pass over memory.
        on_gpu: whether its tensors stand for those of a GPU.
    """

    note: Note
    on_gpu: bool


# The dry run of this context, if anyone counts it.
_DRY_RUN: ContextVar[DryRun | None] = ContextVar("_DRY_RUN", default=None)


@contextmanager
def noting(dry_run: DryRun) -> Iterator[None]:
    """Give the passes over memory of dry runs in this context to its `note`."""
    token = _DRY_RUN.set(dry_run)
    try:
        yield
    finally:
        _DRY_RUN.reset(token)


def note_pass(what: str, num_bytes: int) -> None:
    """Note a pass over memory of tensors that have no content."""
    dry_run = _DRY_RUN.get()
    if dry_run is not None:
        dry_run.note(what, num_bytes)


def stands_for_gpu() -> bool:
    """Return whether tensors without content stand for those of a GPU."""
    dry_run = _DRY_RUN.get()
    return dry_run is not None and dry_run.on_gpu
