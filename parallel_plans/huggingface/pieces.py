"""The pieces of a rank's tokens that layers with a state take one after another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Piece(NamedTuple):
    """Neighbouring tokens of a row, of one document."""

    begin: int
    end: int
    is_first: bool
    """Whether the document begins with them: there is no state before it."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """What layers with a state need to know of a batch.

    Not a tuple: fully_shard moves the tensors in a layer's tuples to the device.
    """

    length: int
    """Tokens of this rank, in a row."""
    starts: tuple[tuple[int, ...], ...]
    """The tokens of this rank with which documents begin, by row; one row serves all."""
    padding: Tensor | None
    """The attention mask of these tokens, `(B, L)`, if the batch has one."""
    batch: tuple[Tensor | None, Tensor | None]
    """Boundaries and attention mask of all ranks' tokens."""

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
        """Those of one rank, which has as many neighbouring tokens as each other one.

        Args:
            boundaries: of documents, `(D+1,)` or `(B, D+1)`; `None` for one document.
            length: of all ranks' tokens, with padding.
            mask: the attention mask of all of them but those, `(B, S)`.
            rank: on the axis.
            world_size: of the axis.
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
        """Whether layers cannot tell the batches apart, on any rank."""
        return all(
            x is y or (x is not None and y is not None and torch.equal(x, y))
            for x, y in zip(self.batch, other.batch, strict=True)
        )

    def of_row(self, row: int) -> list[Piece]:
        """Those of a row, in their order."""
        starts = self.starts[row if len(self.starts) > 1 else 0]
        cuts = sorted({0, *starts, self.length})
        return [Piece(x, y, x in starts) for x, y in pairwise(cuts)]

    def mask(self, row: int, piece: Piece) -> Tensor | None:
        """The attention mask of a piece, `(1, L)`, which may be one token longer."""
        if self.padding is None:
            return None
        row = row if len(self.padding) > 1 else 0
        return self.padding[row : row + 1, piece.begin : piece.end]
