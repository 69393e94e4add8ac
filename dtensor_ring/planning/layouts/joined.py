"""What groups of ranks hold together, once they have traded tokens for heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dtensor_ring.planning.layouts.layout import Layout
from dtensor_ring.planning.layouts.run import Run
from dtensor_ring.planning.values.ranges import expanded, united


@dataclass(frozen=True)
class Joined(Layout):
    """Group g holds what ranks `g * heads` to `(g + 1) * heads - 1` of a layout hold together.

    Its ranks are the groups. Their tokens are in the order of positions.

    >>> from dtensor_ring.planning.layouts.layout import ZigZag
    >>> Joined(ZigZag(), 2).positions(rank=0, world_size=2, seq_len=16)
    [0, 1, 2, 3, 12, 13, 14, 15]
    """

    name: ClassVar[str] = "joined"
    parameters: ClassVar[tuple[str, ...]] = ("layout", "heads")

    layout: Layout
    heads: int

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        num_ranks = world_size * self.heads
        runs = [run for x in self._ranks(rank) for run in self.layout.runs(x, num_ranks, seq_len)]
        starts, lengths, strides = (
            np.array([(run.start, run.length, run.stride) for run in runs], dtype=np.int64)
            .reshape(-1, 3)
            .T
        )
        # Runs of a stride lie between one another: what is left of them are their single tokens.
        pieces = np.where(strides > 1, lengths, 1)
        whose, number = expanded(np.zeros_like(pieces), pieces)
        firsts = starts[whose] + number * strides[whose]
        sizes = np.where(strides > 1, 1, lengths)[whose]
        _, firsts, ends = united(np.zeros_like(firsts), firsts, firsts + sizes)
        return tuple(map(Run, firsts.tolist(), (ends - firsts).tolist()))

    def num_tokens(self, rank: int, world_size: int, seq_len: int) -> int:
        num_ranks = world_size * self.heads
        return sum(self.layout.num_tokens(x, num_ranks, seq_len) for x in self._ranks(rank))

    def _ranks(self, group: int) -> range:
        """The ranks of a group."""
        return range(group * self.heads, (group + 1) * self.heads)
