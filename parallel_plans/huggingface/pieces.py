"""Splits a rank's tokens into the pieces that stateful layers process in order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Piece(NamedTuple):
    """A contiguous range of tokens of one row and one document.

    Attributes:
        begin: local index of the first token.
        end: local index after the last token.
        is_first: whether the document begins here, so that there is no state before it.
    """

    begin: int
    end: int
    is_first: bool


@dataclass(frozen=True, eq=False)
class Pieces:
    """What stateful layers need to know about a batch.

    This is not a tuple, because fully_shard moves tensors in a layer's tuples to the device.

    Attributes:
        length: tokens of a row on this rank.
        starts: local indices at which documents begin, for each row; a single row serves all.
        padding: attention mask of the local tokens, `(B, L)`, if the batch has one.
        batch: boundaries and attention mask of the tokens of all ranks.
    """

    length: int
    starts: tuple[tuple[int, ...], ...]
    padding: Tensor | None
    batch: tuple[Tensor | None, Tensor | None]

    @classmethod
    @torch.compiler.disable
    def of(
        cls,
        boundaries: Tensor | None,
        length: int,
        mask: Tensor | None,
        rank: int,
        world_size: int,
    ) -> Pieces:
        """Return the pieces of one rank. Each rank has a contiguous shard of the same length.

        Args:
            boundaries: boundaries of documents, `(D+1,)` or `(B, D+1)`; `None` for one document.
            length: tokens of a row on all ranks, with padding.
            mask: the attention mask of all tokens without that padding, `(B, S)`.
            rank: index of the rank on the axis.
            world_size: number of ranks of the axis.
        """
        shard = length // world_size
        begin, end = rank * shard, (rank + 1) * shard
        padding = None
        if mask is not None:
            padding = nn.functional.pad(mask, (0, length - mask.shape[1]))[:, begin:end]
        rows = [[0]] if boundaries is None else boundaries.reshape(-1, boundaries.shape[-1])
        # The last boundary is the end of a row, where no document begins; it may be repeated.
        found = [sorted({int(x) - begin for x in row if begin <= x < end}) for row in rows]
        return cls(shard, tuple(map(tuple, found)), padding, (boundaries, mask))

    def same_batch(self, other: Pieces) -> bool:
        """Return whether both batches have equal boundaries and masks on all ranks."""
        return all(
            x is y or (x is not None and y is not None and torch.equal(x, y))
            for x, y in zip(self.batch, other.batch, strict=True)
        )

    def of_row(self, row: int) -> list[Piece]:
        """Return the pieces of a row in order."""
        starts = self.starts[row if len(self.starts) > 1 else 0]
        cuts = sorted({0, *starts, self.length})
        return [Piece(x, y, x in starts) for x, y in pairwise(cuts)]

    def mask(self, row: int, piece: Piece) -> Tensor | None:
        """Return the attention mask of a piece, `(1, L)`; `None` without a mask."""
        if self.padding is None:
            return None
        row = row if len(self.padding) > 1 else 0
        return self.padding[row : row + 1, piece.begin : piece.end]
