"""One forward with a cache: what is cached, what is new, and how each layer attends to both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dtensor_ring import SequenceAxis
from dtensor_ring.planning.cache_table import CacheTable
from dtensor_ring.planning.layout import Layout
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
    """New tokens whose logits are wanted, the last ones: no others will be taken back."""
    chunks: frozenset[int]
    """Sizes of the chunks that layers see."""

    @property
    def end(self) -> int:
        """Tokens after it."""
        return self.past + self.num_tokens

    @cached_property
    def runs(self) -> Tensor:
        """Of the new tokens, as they are dealt, counted from the first one: `(W, R, 2)`."""
        table = CacheTable.empty(self.axis.mesh.size()).append_dealt(self.layout, self.dealt_length)
        return torch.tensor(table.numbers)

    def documents(self, begin: int) -> Documents:
        """Of the positions from `begin` on, counted from there."""
        if self.left_padding is None and not begin and self.dealt_length <= self.num_tokens:
            return Documents()
        return cached_documents(self.left_padding, begin, self.end, self.chunks)

    def full(self, key_runs: Tensor, num_columns: int, tokens: Tensor | None) -> Frame:
        """How layers attend that see everything.

        Args:
            key_runs: of the cache, the new tokens included.
            num_columns: of this rank.
            tokens: the new ones, which ranks compare in a message that travels anyhow.
        """
        documents = self.documents(0)
        if self.dealt_length:
            runs = _shifted(self.runs, self.past)
            return Dealt(self.axis, self.past + self.dealt_length, documents, runs, key_runs)
        starts = torch.tensor([self.past])
        mesh = self.axis.mesh
        return Decoded(self.axis, documents, key_runs, starts, num_columns, mesh, tokens)

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
        runs = _shifted(self.runs, num_held)
        held = [window_slice(rank, len(runs), num_held) for rank in range(len(runs))]
        slices = torch.tensor([[[first, last - first]] for first, last in held], dtype=runs.dtype)
        key_runs = torch.cat([slices, runs], 1)
        length = num_held + self.dealt_length
        return Dealt(self.axis, length, self.documents(begin), runs, key_runs)


def window_slice(rank: int, world_size: int, num_held: int) -> tuple[int, int]:
    """Begin and end of what a rank brings of tokens that all ranks have."""
    return rank * num_held // world_size, (rank + 1) * num_held // world_size


def _shifted(runs: Tensor, by: int) -> Tensor:
    """Runs that begin so much later; those without a token stay as they are."""
    return torch.stack([runs[..., 0] + by * (runs[..., 1] > 0), runs[..., 1]], -1)
