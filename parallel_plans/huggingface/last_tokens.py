"""The last tokens of a sequence that is dealt to ranks, such as those whose logits are wanted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring import SequenceAxis
from dtensor_ring.extension import Layout


class LastTokens(NamedTuple):
    """Which of them this rank has: they are neighbours, as a rank's tokens ascend in position."""

    axis: SequenceAxis
    count: int
    """On all ranks together."""
    begin: int
    """The first of this rank's, among its tokens."""
    places: tuple[int, ...]
    """Of each of this rank's, its place among all."""

    @classmethod
    def of(
        cls, axis: SequenceAxis, layout: Layout, seq_len: int, dealt_length: int, count: int
    ) -> LastTokens:
        """The last `count` of `seq_len` tokens, which were dealt with padding behind them."""
        count = min(count, seq_len)
        first = seq_len - count
        runs = layout.runs(axis.mesh.get_local_rank(), axis.mesh.size(), dealt_length)
        parts = [(run, *run.indices(first, seq_len)) for run in runs]
        places = (run.position(x) - first for run, begin, end in parts for x in range(begin, end))
        num_before = sum(run.indices(0, first)[1] for run in runs)
        return cls(axis, count, num_before, tuple(places))

    def local_indices(self, device: torch.device) -> Tensor:
        """The places of this rank's among its tokens."""
        return torch.arange(self.begin, self.begin + len(self.places), device=device)

    def join(self, local: Tensor, dim: int) -> Tensor:
        """All of them on every rank, of what each rank has made of its own."""
        shape = (*local.shape[:dim], self.count, *local.shape[dim + 1 :])
        places = torch.tensor(self.places, dtype=torch.int64, device=local.device)
        # Each place is filled on one rank: a sum with zeros is exact.
        return self.axis.sum(local.new_zeros(shape).index_copy(dim, places, local))
