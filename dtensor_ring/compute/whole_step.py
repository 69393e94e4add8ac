"""One launch for all tiles of a step, for kernels that take a mask as intervals of keys."""

from __future__ import annotations

from dataclasses import replace

from dtensor_ring.compute.kernels.kernel import Intervals, Launch
from dtensor_ring.compute.memory import box_region
from dtensor_ring.planning.intervals import intervals_of
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.tile import FULL


def _num_bytes(found: tuple[Launch]) -> int:
    intervals = found[0].intervals
    assert intervals is not None, "a step is launched by its intervals"
    return intervals.num_bytes


# The numbers grow with the queries, and not with the tiles, as those do that a plan counts.
@cached_bytes(2**28, _num_bytes)
def whole_step(step: Step, batch_size: int, in_flight: bool = False) -> tuple[Launch]:
    """Return the launch of all tiles of a step, which is cached.

    It covers the batch rows, queries and keys from the first to the last that a tile has. A query
    between them may see nothing.

    Args:
        step: the step, which has a tile.
        batch_size: number of batch rows.
        in_flight: whether messages are in flight during the launch.
    """
    if in_flight:
        return (replace(whole_step(step, batch_size)[0], in_flight=True),)
    seen = intervals_of(step.tiles, batch_size)
    rows = box_region(seen.batches, seen.rows, batch_size)
    cols = box_region(seen.batches, seen.cols, batch_size)
    return (Launch(rows, cols, FULL, intervals=Intervals(seen.ends)),)
