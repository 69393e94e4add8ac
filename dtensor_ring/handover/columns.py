"""What a layer of a `ShardedCache` gives to a hand-over, and gets of it: columns, or full blocks.

Eight bits stay as they are: full blocks move with their scales, and the columns after them as they
are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.decode.column_memory import ColumnMemory, PlainColumns, QuantisedColumns
from dtensor_ring.handover.plan import ShardMove, closed_and_open
from dtensor_ring.handover.run import MovedPart
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.ranges import Span, length
from dtensor_ring.quantised.block_scales import BLOCK_SIZE
from dtensor_ring.quantised.kept_tokens import QuantisedTokens, format_named


class KeptColumns(NamedTuple):
    """Keys or values of a layer, on any rank.

    Attributes:
        shape: `(B, N, H)`: sequences, heads of all ranks, head dim.
        dtype: their dtype before they are rounded.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, like: Tensor, batch: int) -> KeptColumns:
        """Return those of keys or values `(B, N, L, H)`."""
        return cls((batch, like.shape[1], like.shape[3]), like.dtype)

    def empty(
        self, heads: Span, num_cols: int, device: torch.device, kv_dtype: str | None, kind: str
    ) -> ColumnMemory:
        """Return memory of some heads for `num_cols` columns, which a hand-over writes."""
        batch, _, head_dim = self.shape
        shape = batch, length(heads), num_cols, head_dim
        format = format_named(kv_dtype)
        with torch.inference_mode(False):  # tensors made in it are read-only outside
            if format is None:
                return PlainColumns(torch.empty(shape, dtype=self.dtype, device=device))
            none = torch.empty((*shape[:2], 0, head_dim), dtype=self.dtype, device=device)
            return QuantisedColumns(
                _blank(QuantisedTokens.empty(none, format, kind), num_cols), kind
            )


def _blank(none: QuantisedTokens, num_cols: int) -> QuantisedTokens:
    """Return memory of `num_cols` columns in the format of `none`, which has no columns."""
    num_blocks, num_open = divmod(num_cols, none.block_size)

    def wider(x: Tensor, number: int) -> Tensor:
        return x.new_empty((*x.shape[:2], number, x.shape[3]))

    blocks = none.closed
    closed = replace(
        blocks,
        data=wider(blocks.data, num_blocks * none.block_size),
        scales=wider(blocks.scales, num_blocks),
        means=None if blocks.means is None else wider(blocks.means, num_blocks),
    )
    return replace(none, closed=closed, open=wider(none.open, num_open))


@dataclass(frozen=True, eq=False)
class ColumnMove:
    """A move of columns, and its full blocks and other columns if these are rounded.

    Attributes:
        move: the move.
        closed, open: see `closed_and_open`; `None` if nothing is rounded.
        num_cols: the number of columns of the source, and of the target.
    """

    move: ShardMove
    closed: ShardMove | None
    open: ShardMove | None
    num_cols: tuple[int, int]

    @classmethod
    def of(cls, move: ShardMove, num_cols: tuple[int, int], kv_dtype: str | None) -> ColumnMove:
        """Split a move as the format asks for.

        Raises:
            ValueError: if a block with scales would be cut.
        """
        if kv_dtype is None:
            return cls(move, None, None, num_cols)
        closed, open = closed_and_open(move, BLOCK_SIZE, num_cols)
        return cls(move, closed, open, num_cols)

    def given(self, memory: ColumnMemory, num_heads: int) -> list[MovedPart]:
        """Return the parts that leave the memory of the source, which has all heads."""
        return self._parts(memory, self.move.span_of(num_heads), 0)

    def taken(self, memory: ColumnMemory) -> list[MovedPart]:
        """Return where it goes in the memory of the target, which has its heads only."""
        return self._parts(memory, (0, memory.like.shape[1]), 1)

    @cached_property
    def _cols(self) -> tuple[tuple[Cols, ...], tuple[Cols, ...]]:
        """Return the columns of all tensors by side; made once, and so are indices of them."""
        return self._cols_of(0), self._cols_of(1)

    def _cols_of(self, side: int) -> tuple[Cols, ...]:
        if self.closed is None or self.open is None:
            return (_side_of(self.move, side),)
        blocks = _side_of(self.closed, side)
        data = Cols(tuple([(a * BLOCK_SIZE, b * BLOCK_SIZE) for a, b in blocks.spans]))
        # In the order of the tensors in `_parts`: numbers, scales, means, columns not rounded yet.
        return data, blocks, blocks, _side_of(self.open, side)

    def _parts(self, memory: ColumnMemory, heads: Span, side: int) -> list[MovedPart]:
        tensors: tuple[Tensor | None, ...]
        if isinstance(memory, QuantisedColumns):
            # A cache may have more columns than move: the last ones of a prompt may be padding.
            tokens = memory.tokens.crop(self.num_cols[side])
            q = tokens.closed
            # Numbers of 8 bits as bytes: few kernels know all their dtypes.
            tensors = q.data.view(torch.uint8), q.scales, q.means, tokens.open
        else:
            assert isinstance(memory, PlainColumns)
            tensors = (memory.buffer,)
        found = zip(tensors, self._cols[side], strict=True)
        return [MovedPart(_narrow(x, heads), cols) for x, cols in found if x is not None]


def _side_of(move: ShardMove, side: int) -> Cols:
    return move.target_cols() if side else move.source_cols()


def _narrow(x: Tensor, heads: Span) -> Tensor:
    return x if length(heads) == x.shape[1] else x.narrow(1, heads[0], length(heads))
