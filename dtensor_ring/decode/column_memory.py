"""The columns of a cache on this rank: their memory in each layer, and steps that append them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_ring.compute.trace import NOTHING
from dtensor_ring.decode.plan import CacheTable
from dtensor_ring.ops.checks import check_strided
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.ranges import Span
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
    def append(self, new: Sequence[Tensor], col: int, capacity: int) -> ColumnMemory:
        """Put new columns after the first `col` columns.

        Args:
            new: the columns in their order, in any number of tensors `(B, N, L, H)`.
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


@contextmanager
def _inside_no_mode() -> Iterator[None]:
    # Tensors made in inference mode are read-only outside of it.
    with torch.inference_mode(False), torch.no_grad():
        yield


def writing() -> AbstractContextManager[None]:
    """Return the context of a change of memory; entering modes costs as much as a copy."""
    is_needed = torch.is_inference_mode_enabled() or torch.is_grad_enabled()
    return _inside_no_mode() if is_needed else NOTHING


def check_plain(given: tuple[Tensor, Tensor], num_tokens: int) -> None:
    """Refuse a key and value that are not plain tensors of `num_tokens` tokens."""
    for name, x in zip(("key", "value"), given, strict=True):
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            fix = "; use .to_local()" if isinstance(x, DTensor) else ""
            raise TypeError(f"{name} must be a plain tensor, got {type(x).__name__}{fix}")
        check_strided(name, x)
        if x.ndim != 4 or x.shape[SEQUENCE] != num_tokens:
            raise ValueError(
                f"{name} must be (B, N, L, H) with the {num_tokens} tokens of this append step, "
                f"got {tuple(x.shape)}; of a sharded append step a rank appends its own shard, "
                "else all tokens"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} needs a gradient, which a cache has none of: use torch.no_grad()"
            )


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

    @cached_property
    def _place(self) -> tuple[Any, Any, Any]:
        """Shape, strides and offset of the buffer: each token would ask the tensor for them."""
        return self.buffer.shape, self.buffer.stride(), self.buffer.storage_offset()

    def read(self, num_cols: int, begin: int = 0) -> Tensor:
        """Return columns as a view, as `narrow` does, which costs the host three times as much."""
        (batch, heads, _, head_dim), strides, offset = self._place
        shape = batch, heads, num_cols, head_dim
        return self.buffer.as_strided(shape, strides, offset + begin * strides[SEQUENCE])

    def append(self, new: Sequence[Tensor], col: int, capacity: int) -> PlainColumns:
        grown = self if self._place[0][SEQUENCE] >= capacity else self._grown(col, capacity)
        for x in new:
            num_cols = x.shape[SEQUENCE]
            grown.read(num_cols, begin=col).copy_(x)
            col += num_cols
        return grown

    def select(self, rows: Tensor) -> PlainColumns:
        return PlainColumns(self.buffer.index_select(0, rows.to(self.buffer.device)))

    def shrink(self, num_cols: int) -> PlainColumns:
        is_larger = self.buffer.shape[SEQUENCE] > num_cols
        return PlainColumns(self.read(num_cols).clone()) if is_larger else self

    def _grown(self, num_cols: int, capacity: int) -> PlainColumns:
        """Return larger memory, for `capacity` columns, with the first `num_cols` columns."""
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

    def append(self, new: Sequence[Tensor], col: int, capacity: int) -> QuantisedColumns:
        if not new:
            return self
        return QuantisedColumns(self.tokens.append(torch.cat([*new], SEQUENCE)), self.kind)

    def select(self, rows: Tensor) -> QuantisedColumns:
        return QuantisedColumns(self.tokens.select(rows), self.kind)

    def shrink(self, num_cols: int) -> QuantisedColumns:
        return QuantisedColumns(self.tokens.crop(num_cols), self.kind)


# The largest number of layers that an error lists.
MAX_LISTED = 8


class AppendStep(NamedTuple):
    """Tokens that all layers append, seen from one rank.

    Attributes:
        begin: the position of the first token.
        is_sharded: whether the append step is sharded by the layout.
        num_given: the number of tokens that each layer gets on this rank.
        kept: spans of those tokens that stay on this rank, in the order of columns.
        cols: the new columns, which are the last ones.
        capacities: by rank, the columns that fit into a layer's memory after the append step.
        capacities_before: the same before the append step.
        is_first: whether the append step sets the number of sequences.
    """

    begin: int
    is_sharded: bool
    num_given: int
    kept: tuple[Span, ...]
    cols: Span
    capacities: tuple[int, ...]
    capacities_before: tuple[int, ...]
    is_first: bool

    def kept_of(self, x: Tensor) -> Sequence[Tensor]:
        """Return those tokens of a layer's `(B, N, L, H)` that stay on this rank, as views."""
        if self.kept == ((0, self.num_given),):  # a view costs the host as much as a small kernel
            return (x,)
        return [x.narrow(SEQUENCE, begin, end - begin) for begin, end in self.kept]


class AppendSteps:
    """The table of a cache, and the current append step of its layers.

    Args:
        table: a table without tokens.
        rank: the rank whose columns these are.
        num_layers: the number of layers that append in each append step.
        kv_dtype: the format of full blocks, if they are rounded. Layers then have no memory beyond
            their columns.
    """

    def __init__(
        self, table: CacheTable, rank: int, num_layers: int, kv_dtype: str | None = None
    ) -> None:
        self.rank, self.num_layers, self._kv_dtype = rank, num_layers, kv_dtype
        self.start(table)

    def start(self, table: CacheTable) -> None:
        """Start over with a table; its tokens have no append step."""
        self.table = table
        self.last: AppendStep | None = None
        self.batch: int | None = None
        # A checksum of the format and all selections of sequences, 0 without either.
        self.order = crc32((self._kv_dtype or "").encode())
        self._capacities = table.num_local
        self._behind: set[int] = set()

    def take_over(self, table: CacheTable, batch: int, order: int) -> None:
        """Start with columns that all layers have got from another cache, see `handover/`."""
        self.start(table)
        self.batch, self.order = batch, order

    def num_cols(self, number: int) -> int:
        """Return the number of columns that a layer has on this rank."""
        if self.last is not None and number in self._behind:
            return self.last.cols[0]
        return self.table.num_local[self.rank]

    def begin(self, num_tokens: int, layout: Layout | None) -> None:
        """Begin an append step, sharded by the layout unless that is `None`.

        Raises:
            ValueError: if a layer has not appended the previous append step, or the layout cannot
                shard this one.
        """
        self.check_complete("begin an append step")
        before = self.table
        if layout is None:
            table = before.append(num_tokens)
            num_given = table.seq_len - before.seq_len
            own = table.runs_from(self.rank, before.seq_len)
            kept = tuple([(x - before.seq_len, x + n - before.seq_len) for x, n in own])
        else:
            table = before.append_sharded(layout, num_tokens)
            num_given = table.num_local[self.rank] - before.num_local[self.rank]
            kept = ((0, num_given),)
        if table.seq_len == before.seq_len:
            raise ValueError("num_tokens must be from 1 on, got 0")
        cols = before.num_local[self.rank], table.num_local[self.rank]
        capacities = table.num_local
        if self._kv_dtype is None:  # a layer keeps memory that it has allocated
            capacities = tuple(map(max, self._capacities, table.num_reserved))
        self.last = AppendStep(
            begin=before.seq_len,
            is_sharded=layout is not None,
            num_given=num_given,
            kept=kept,
            cols=cols,
            capacities=capacities,
            capacities_before=self._capacities,
            is_first=self.batch is None,
        )
        self._capacities = capacities
        self.table, self._behind = table, set(range(self.num_layers))

    def of_layer(self, number: int) -> AppendStep:
        """Return the append step that a layer appends now.

        Raises:
            ValueError: if the layer has appended it already, or no append step has begun.
        """
        if self.last is None:
            raise ValueError(
                f"layer {number} cannot append: no append step has begun, cache.begin(num_tokens, "
                "dealt=...) says how many tokens come"
            )
        if number not in self._behind:
            raise ValueError(
                f"layer {number} has made this append step already; cache.begin(num_tokens, "
                "dealt=...) begins the next one"
            )
        return self.last

    def done(self, number: int) -> None:
        """Note that a layer has appended the current append step."""
        self._behind.discard(number)

    def select(self, rows: Sequence[int]) -> None:
        """Update the batch size and the checksum for a selection of sequences."""
        if self.batch is None or [*rows] == [*range(self.batch)]:  # nothing moves
            return
        self.batch = len(rows)
        self.order = crc32(np.array(rows, dtype=np.int64).tobytes(), self.order)

    def check_complete(self, what: str) -> None:
        """Refuse an action while some layers have not appended the current append step.

        Raises:
            ValueError: if a layer has not appended.
        """
        if not self._behind or self.last is None:
            return
        listed = ", ".join(map(str, sorted(self._behind)[:MAX_LISTED]))
        more = ", ..." if len(self._behind) > MAX_LISTED else ""
        raise ValueError(
            f"cannot {what}: of {self.num_layers} layers, {listed}{more} did not append the "
            f"{self.last.num_given} tokens of this append step; if it failed, "
            f"crop({self.last.begin}) takes it back"
        )

    def crop(self, seq_len: int) -> tuple[int, ...] | None:
        """Keep the first `seq_len` positions.

        An append step that is dropped whole need not be complete: after a failure, it may be so on
        some ranks only.

        Returns:
            The capacities that layers shrink to; `None` if they keep their memory.

        Raises:
            ValueError: if the length is negative, too large, or within an incomplete append step.
        """
        table, last = self.table.crop(seq_len), self.last
        dropped = last if last is not None and table.seq_len <= last.begin else None
        if dropped is None:
            self.check_complete(f"crop to {table.seq_len} tokens")
        else:  # the memory of the append step is freed
            self._capacities = dropped.capacities_before
            if dropped.is_first:  # no tokens are left, so the next append step sets the batch size
                self.batch = None
        self.table, self.last, self._behind = table, None, set()
        if self._kv_dtype is not None:
            self._capacities = table.num_local
        elif dropped is None:
            return None
        return self._capacities
