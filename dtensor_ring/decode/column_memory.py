"""The memory of a layer's columns on this rank: as they are, with room for more, or rounded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_ring.quantised.block_scales import Format
from dtensor_ring.quantised.kept_tokens import QuantisedTokens, kept_bytes

SEQUENCE = 2  # the dim of the columns


class ColumnMemory(ABC):
    """The columns of keys or of values. A change returns the memory to use from then on.

    A change that raises leaves the columns as they were.
    """

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """Return a tensor with the heads, head dim, dtype and device of the columns."""

    @abstractmethod
    def num_bytes(self, batch: int, num_cols: int) -> int:
        """Return the bytes of `num_cols` columns of `batch` sequences."""

    @abstractmethod
    def read(self, num_cols: int) -> Tensor:
        """Return the first columns, `(B, N, C, H)`."""

    @abstractmethod
    def append(self, parts: Sequence[Tensor], col: int, capacity: int) -> ColumnMemory:
        """Put new columns, in parts, after the first `col` columns.

        Args:
            parts: tensors `(B, N, L, H)`.
            col: the number of columns before.
            capacity: the number of columns that memory is needed for.
        """

    @abstractmethod
    def select(self, rows: Tensor) -> ColumnMemory:
        """Keep these rows of the batch, in this order."""

    @abstractmethod
    def shrink(self, num_cols: int) -> ColumnMemory:
        """Free the memory of all but the first columns."""


def column_memory(like: Tensor, format: Format | None, kind: str) -> ColumnMemory:
    """Return memory without columns, see `QuantisedTokens.empty`."""
    if format is not None:
        return QuantisedColumns(QuantisedTokens.empty(like, format, kind), kind)
    return PlainColumns(like.new_empty(*like.shape[:2], 0, like.shape[3]))


@dataclass(frozen=True)
class PlainColumns(ColumnMemory):
    """Columns as they are, the first ones of a buffer `(B, N, capacity, H)`."""

    buffer: Tensor

    @property
    def like(self) -> Tensor:
        return self.buffer

    def num_bytes(self, batch: int, num_cols: int) -> int:
        _, heads, _, head_dim = self.buffer.shape
        return kept_bytes((batch, heads, num_cols, head_dim), self.buffer.dtype, None, "keys")

    def read(self, num_cols: int) -> Tensor:
        return self.buffer.narrow(SEQUENCE, 0, num_cols)  # faster than a slice

    def append(self, parts: Sequence[Tensor], col: int, capacity: int) -> PlainColumns:
        grown = self._grown(col, capacity)
        for x in parts:
            grown.buffer.narrow(SEQUENCE, col, x.shape[SEQUENCE]).copy_(x)
            col += x.shape[SEQUENCE]
        return grown

    def select(self, rows: Tensor) -> PlainColumns:
        return PlainColumns(self.buffer.index_select(0, rows.to(self.buffer.device)))

    def shrink(self, num_cols: int) -> PlainColumns:
        is_larger = self.buffer.shape[SEQUENCE] > num_cols
        return PlainColumns(self.read(num_cols).clone()) if is_larger else self

    def _grown(self, num_cols: int, capacity: int) -> PlainColumns:
        """Return memory for `capacity` columns, with the first `num_cols` columns."""
        if self.buffer.shape[SEQUENCE] >= capacity:
            return self
        larger = self.buffer.new_empty(*self.buffer.shape[:2], capacity, self.buffer.shape[3])
        larger.narrow(SEQUENCE, 0, num_cols).copy_(self.read(num_cols))
        return PlainColumns(larger)


@dataclass(frozen=True)
class QuantisedColumns(ColumnMemory):
    """Columns whose full blocks are in eight bits. They take what they need; reading copies them.

    Attributes:
        tokens: the columns.
        kind: `"keys"` or `"values"`.
    """

    tokens: QuantisedTokens
    kind: str

    @property
    def like(self) -> Tensor:
        return self.tokens.open

    def num_bytes(self, batch: int, num_cols: int) -> int:
        _, heads, _, head_dim = self.like.shape
        shape = batch, heads, num_cols, head_dim
        return kept_bytes(shape, self.like.dtype, self.tokens.format, self.kind)

    def read(self, num_cols: int) -> Tensor:
        return self.tokens.crop(num_cols).read()

    def append(self, parts: Sequence[Tensor], col: int, capacity: int) -> QuantisedColumns:
        if not parts:
            return self
        return QuantisedColumns(self.tokens.append(torch.cat([*parts], SEQUENCE)), self.kind)

    def select(self, rows: Tensor) -> QuantisedColumns:
        return QuantisedColumns(self.tokens.select(rows), self.kind)

    def shrink(self, num_cols: int) -> QuantisedColumns:
        return QuantisedColumns(self.tokens.crop(num_cols), self.kind)
