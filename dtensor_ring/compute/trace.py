"""Labels the steps of a ring in a profiler's trace. Without a profiler, labels do nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch.autograd import profiler

_NOTHING = nullcontext()


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
            return _NOTHING
        return profiler.record_function(
            f"ring {self.ring}, step {self.step}, source {self.source}: {what}"
        )
