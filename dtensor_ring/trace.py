"""Labels in a profiler's trace of where in a ring time goes; without a profiler they do nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch.autograd import profiler

_NOTHING = nullcontext()


class Label(NamedTuple):
    """A step of a ring: forward or backward, its number, and whose keys and values it works on."""

    ring: str
    step: int
    source: int

    def __call__(self, what: str) -> AbstractContextManager[Any]:
        """Around what is done in this step: `with label("tile"): ...`."""
        if not profiler._is_profiler_enabled:
            return _NOTHING
        return profiler.record_function(
            f"ring {self.ring}, step {self.step}, source {self.source}: {what}"
        )
