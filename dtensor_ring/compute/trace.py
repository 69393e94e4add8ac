"""Labels in a profiler's trace for the parts of a ring; without a profiler they do nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch.autograd import profiler

_NOTHING = nullcontext()


class Label(NamedTuple):
    """A step of a ring, for a profile.

    Attributes:
        ring: `"forward"` or `"backward"`.
        step: its number, from 0.
        source: rank whose keys and values the step works on.
    """

    ring: str
    step: int
    source: int

    def __call__(self, what: str) -> AbstractContextManager[Any]:
        """Record what is done in this step: `with label("tile"): ...`."""
        # Building the string alone would cost more than all else here.
        if not profiler._is_profiler_enabled:
            return _NOTHING
        return profiler.record_function(
            f"ring {self.ring}, step {self.step}, source {self.source}: {what}"
        )
