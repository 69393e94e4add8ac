"""How much of an accumulator holds something."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dtensor_ring.region import Region, region


class Filled:
    """How far the tokens of fresh memory `(B, N, L, H)` are filled, by batch row.

    What is first for all its tokens is written, and nothing zeroed for it. Regions mostly come in
    the order of their tokens, so one mark a row will do: what they skip, or reach in part, gets
    zeros.

    Args:
        shape: of the memory.
        is_full: whether all of it holds something already.
    """

    def __init__(self, shape: Sequence[int], is_full: bool = False) -> None:
        self._num_tokens = shape[2]
        self._ends = [self._num_tokens if is_full else 0] * shape[0]

    def reach(self, memory: Tensor, at: Region) -> bool:
        """Whether the region is new, so that it is to be written; else it can be added to."""
        start, end, _ = at[2].indices(self._num_tokens)
        ends = self._ends[at[0]]
        is_new = max(ends, default=0) <= start
        zeros_to = start if is_new else end
        for row, filled in enumerate(ends):
            if filled < zeros_to:
                memory[at[0]][row, :, filled:zeros_to].zero_()
        self._ends[at[0]] = [max(filled, end) for filled in ends]
        return is_new

    def add(self, memory: Tensor, at: Region, x: Tensor) -> None:
        """Add to a region, or begin it."""
        if self.reach(memory, at):
            memory[at].copy_(x)
        else:
            memory[at].add_(x)

    def finish(self, memory: Tensor) -> None:
        """Fill what nothing came to."""
        self.reach(memory, region(None, (self._num_tokens, self._num_tokens)))
