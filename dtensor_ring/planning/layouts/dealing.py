"""The runs of all ranks: checked once, and as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from dtensor_ring.planning.layouts.layout import Layout
from dtensor_ring.planning.layouts.run import Run, joined
from dtensor_ring.planning.values.cache import cached_bytes

BYTES_PER_RUN = 200
"""Memory of a `Run`, its integers, and its row in the arrays."""


@dataclass(frozen=True, eq=False)
class Dealing:
    """How a layout deals one sequence to all ranks.

    The arrays have one entry for each run, of all ranks, in the order of the first positions.
    """

    shards: tuple[tuple[Run, ...], ...]
    """The runs of each rank."""
    starts: np.ndarray
    """First position."""
    lengths: np.ndarray
    owners: np.ndarray
    """The rank that holds the run."""
    cols: np.ndarray
    """Where in the shard of its owner the run begins."""

    @cached_property
    def stride(self) -> int:
        """Distance of neighbours in a run: the same for all runs."""
        return next((shard[0].stride for shard in self.shards if shard), 1)

    def num_local(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(run.length for run in self.shards[rank])


@cached_bytes(2**26, lambda dealing: BYTES_PER_RUN * len(dealing.starts) + 64)
def deal(layout: Layout, world_size: int, seq_len: int) -> Dealing:
    """The runs of all ranks; at most 64 MiB of them are kept.

    Raises:
        ValueError: if the layout cannot deal the length, or breaks the promise of `Layout.runs`.
    """
    shards = tuple(tuple(layout.runs(rank, world_size, seq_len)) for rank in range(world_size))
    expected = [layout.num_tokens(rank, world_size, seq_len) for rank in range(world_size)]
    wrong = _own_fault(shards, expected) or _common_fault(shards, seq_len)
    if wrong:
        raise ValueError(
            f"{layout!r} breaks the promise of Layout.runs for {seq_len} tokens on {world_size} "
            f"ranks: {wrong}"
        )
    if all(run.stride == 1 for shard in shards for run in shard):
        # Neighbours, as the halves of zigzag's last rank are, make fewer tiles as one run.
        shards = tuple(joined(list(shard)) for shard in shards)
    rows = [
        (run.start, run.length, rank, col)
        for rank, shard in enumerate(shards)
        for run, col in zip(shard, _offsets(shard), strict=True)
    ]
    # In the order of positions, which what searches them relies on.
    table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
    return Dealing(shards, *np.ascontiguousarray(table.T))


def _offsets(shard: tuple[Run, ...]) -> list[int]:
    """Where in the shard each run begins."""
    offsets, end = [], 0
    for run in shard:
        offsets.append(end)
        end += run.length
    return offsets


def _own_fault(shards: tuple[tuple[Run, ...], ...], expected: list[int]) -> str | None:
    """What is wrong with the runs of one rank, of so many tokens, whatever the others have."""
    for rank, shard in enumerate(shards):
        for run in shard:
            if run.length < 1 or run.stride < 1:
                return f"rank {rank} has an empty run, {run}"
        # Tiles are found by bisection, which gives wrong results in silence out of order.
        for run, following in pairwise(shard):
            if following.start <= run.last:
                return f"the runs of rank {rank} do not ascend, {following} follows {run}"
        num_tokens = sum(run.length for run in shard)
        if num_tokens != expected[rank]:
            return f"rank {rank} has {num_tokens} tokens, but its shard has {expected[rank]}"
    return None


def _common_fault(shards: tuple[tuple[Run, ...], ...], seq_len: int) -> str | None:
    """What is wrong with the runs of all ranks together: strides, or positions not held once."""
    runs = [(run, rank) for rank, shard in enumerate(shards) for run in shard]
    stride = runs[0][0].stride if runs else 1
    for run, rank in runs:
        if run.stride != stride:
            return f"rank {rank} has a run of stride {run.stride}, others have stride {stride}"
    # Runs of one stride form chains, one for each remainder: each run begins where the last ended.
    runs.sort(key=lambda owned: (owned[0].start % stride, owned[0].start))
    expected, remainder = 0, -1
    for run, rank in runs:
        # A chain may begin anywhere: there are as many tokens as there should be, all within the
        # sequence, so that none can be missing before it.
        if run.start % stride != remainder:
            expected, remainder = run.start, run.start % stride
        if run.start < 0 or run.last >= seq_len:
            return f"rank {rank} has {run}, outside of the sequence"
        if run.start != expected:
            missed = min(run.start, expected)
            return f"rank {rank} has {run}, so that position {missed} is not held exactly once"
        expected = run.last + stride
    return None
