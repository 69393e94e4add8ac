"""One forward with a cache: what is cached, what is new, and how each layer attends to both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_ring import SequenceAxis, ShardedCache
from dtensor_ring.extension import Layout, turn_runs
from parallel_plans.huggingface.documents import Documents, cached_documents
from parallel_plans.huggingface.frames import Dealt, Decoded, Frame


@dataclass(frozen=True)
class Turn:
    """New tokens after those of a cache, either dealt to the ranks or the same on all of them."""

    axis: SequenceAxis
    layout: Layout
    past: int
    """Tokens that are cached."""
    num_tokens: int
    """That are new, on all ranks together."""
    dealt_length: int
    """Of the new ones with the padding that the layout needs; 0 if they are not dealt."""
    left_padding: Tensor | None
    """Of each row, `(B,)`."""
    num_kept: int
    """New tokens whose logits are wanted, the last ones: no others will be taken away."""
    chunks: frozenset[int]
    """Sizes of the chunks that layers see."""

    @property
    def end(self) -> int:
        """Tokens after it."""
        return self.past + self.num_tokens

    def documents(self, begin: int) -> Documents:
        """Of the positions from `begin` on, counted from there."""
        if self.left_padding is None and not begin and self.dealt_length <= self.num_tokens:
            return Documents()
        return cached_documents(self.left_padding, begin, self.end, self.chunks)

    def full(self, cache: ShardedCache) -> Frame:
        """How layers attend that see everything.

        Args:
            cache: theirs, in this turn.
        """
        documents, mesh = self.documents(0), self.axis.mesh
        if self.dealt_length:
            return Dealt(self.axis, None, documents, cache.query_runs, cache.key_runs)
        num_columns = cache.table.num_local[mesh.get_local_rank()]
        starts = torch.tensor([self.past])
        return Decoded(self.axis, documents, cache.key_runs, starts, num_columns, mesh)

    def window(self, num_held: int) -> Frame:
        """How layers attend that have the last tokens of the cache on each rank.

        Args:
            num_held: how many of them.
        """
        begin = self.past - num_held
        if not self.dealt_length:
            key_runs = torch.tensor([[[begin, num_held + self.num_tokens]]])
            starts = torch.tensor([self.past])
            columns = num_held + self.num_tokens
            return Decoded(self.axis, self.documents(0), key_runs, starts, columns, None)
        # Each rank brings its slice of what all have. Positions count from the first of those.
        size = self.axis.mesh.size()
        runs = torch.tensor(turn_runs(self.layout, self.dealt_length, size))
        runs[..., 0] += num_held * (runs[..., 1] > 0)  # runs of no token stay at 0
        held = [window_slice(rank, size, num_held) for rank in range(size)]
        slices = torch.tensor([[[first, last - first]] for first, last in held], dtype=runs.dtype)
        key_runs = torch.cat([slices, runs], 1)
        return Dealt(self.axis, None, self.documents(begin), runs, key_runs, begin)


def window_slice(rank: int, world_size: int, num_held: int) -> tuple[int, int]:
    """Begin and end of what a rank brings of tokens that all ranks have."""
    return rank * num_held // world_size, (rank + 1) * num_held // world_size
