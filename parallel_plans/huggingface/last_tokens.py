"""Locates the last tokens of a sharded sequence, such as those whose logits are requested."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring import SequenceAxis
from dtensor_ring.extension import Layout


class LastTokens(NamedTuple):
    """The last tokens on this rank: a contiguous range, since local positions ascend.

    Attributes:
        axis: the axis that shards the sequence.
        count: number of last tokens on all ranks together.
        begin: local index of the first one on this rank.
        places: index of each local one among all `count` tokens.
    """

    axis: SequenceAxis
    count: int
    begin: int
    places: tuple[int, ...]

    @classmethod
    def of(
        cls, axis: SequenceAxis, layout: Layout, seq_len: int, dealt_length: int, count: int
    ) -> LastTokens:
        """Locate the last `count` of `seq_len` tokens, sharded with padding at the end."""
        count = min(count, seq_len)
        first = seq_len - count
        runs = layout.runs(axis.mesh.get_local_rank(), axis.mesh.size(), dealt_length)
        parts = [(run, *run.indices(first, seq_len)) for run in runs]
        places = (run.position(x) - first for run, begin, end in parts for x in range(begin, end))
        num_before = sum(run.indices(0, first)[1] for run in runs)
        return cls(axis, count, num_before, tuple(places))

    def local_indices(self, device: torch.device) -> Tensor:
        """Return the indices of the last tokens among this rank's tokens."""
        return torch.arange(self.begin, self.begin + len(self.places), device=device)

    def join(self, local: Tensor, dim: int) -> Tensor:
        """Gather the results of all `count` tokens, on every rank, from local results."""
        shape = (*local.shape[:dim], self.count, *local.shape[dim + 1 :])
        places = torch.tensor(self.places, dtype=torch.int64, device=local.device)
        # Each place is filled on one rank: a sum with zeros is exact.
        return self.axis.sum(local.new_zeros(shape).index_copy(dim, places, local))
