"""Describes one forward with a cache, and how each layer attends to past and new tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_ring import SequenceAxis, ShardedCache
from dtensor_ring.extension import Layout, append_runs
from parallel_plans.huggingface.documents import Documents, cached_documents
from parallel_plans.huggingface.frames import Dealt, Decoded, Frame


@dataclass(frozen=True)
class Turn:
    """New tokens after those of a cache, either sharded over the ranks or replicated.

    Attributes:
        axis: the axis of the cache.
        layout: the layout in which new tokens are sharded.
        past: number of cached tokens.
        num_tokens: number of new tokens, on all ranks together.
        dealt_length: number of new tokens with the padding of the layout; 0 if replicated.
        left_padding: number of padding tokens at the start of each row, `(B,)`.
        num_kept: number of last tokens whose logits are requested; no others can be cropped later.
        chunks: sizes of the chunks that layers see.
    """

    axis: SequenceAxis
    layout: Layout
    past: int
    num_tokens: int
    dealt_length: int
    left_padding: Tensor | None
    num_kept: int
    chunks: frozenset[int]

    @property
    def end(self) -> int:
        """The number of cached tokens after this turn."""
        return self.past + self.num_tokens

    def documents(self, begin: int) -> Documents:
        """Return the documents of the positions from `begin` on, counted from there."""
        if self.left_padding is None and not begin and self.dealt_length <= self.num_tokens:
            return Documents()
        return cached_documents(self.left_padding, begin, self.end, self.chunks)

    def full(self, cache: ShardedCache) -> Frame:
        """Return how layers that see everything attend.

        Args:
            cache: the cache of these layers, in this turn.
        """
        documents, mesh = self.documents(0), self.axis.mesh
        if self.dealt_length:
            return Dealt(self.axis, None, documents, cache.query_runs, cache.key_runs)
        num_columns = cache.table.num_local[mesh.get_local_rank()]
        starts = torch.tensor([self.past], device="cpu")
        return Decoded(self.axis, documents, cache.key_runs, starts, num_columns, mesh)

    def window(self, num_held: int) -> Frame:
        """Return how layers attend that hold the last tokens of the cache on each rank.

        Args:
            num_held: number of tokens that they hold.
        """
        begin = self.past - num_held
        if not self.dealt_length:
            columns = num_held + self.num_tokens
            key_runs = torch.tensor([[[begin, columns]]], device="cpu")
            starts = torch.tensor([self.past], device="cpu")
            return Decoded(self.axis, self.documents(0), key_runs, starts, columns, None)
        # Each rank contributes a slice of the held tokens. Positions count from the first of these.
        size = self.axis.mesh.size()
        runs = torch.tensor(append_runs(self.layout, self.dealt_length, size))
        runs[..., 0] += num_held * (runs[..., 1] > 0)  # empty runs stay at 0
        held = [window_slice(rank, size, num_held) for rank in range(size)]
        slices = torch.tensor([[[first, last - first]] for first, last in held], dtype=runs.dtype)
        key_runs = torch.cat([slices, runs], 1)
        return Dealt(self.axis, None, self.documents(begin), runs, key_runs, begin)


def window_slice(rank: int, world_size: int, num_held: int) -> tuple[int, int]:
    """Return begin and end of a rank's slice of tokens that all ranks hold."""
    return rank * num_held // world_size, (rank + 1) * num_held // world_size
