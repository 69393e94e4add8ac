"""What queries see, as slices: a range of queries, a range of keys, and a band between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

UNBOUNDED = 2**60
"""A bound of a band that is none, in tables: more than any lag, and sums of it fit."""

LARGEST = 2**31 - 1
"""The same where users say it, in int32."""

NUM_FIELDS = 6
"""Of a slice, in its row of a table: begin and end of its queries and of its keys, left, right."""


class Slices:
    """Disjoint slices: one list of them for the whole batch, or one for each batch row.

    Query position q sees key position k if one slice has q among its queries, k among its keys, and
    `-right <= q - k <= left`. Bounds may be negative: `(-1, UNBOUNDED)` are strictly later keys. No
    pair may be in two slices, as it would count twice. Equal by content, and never changed.

    Args:
        query_ranges: `(N, 2)` or `(B, N, 2)`: begin and end of the queries of each slice, in global
            positions; a tensor on the CPU, an array or a sequence of integers.
        key_ranges: those of the keys, of the same shape.
        bands: `left` and `right` of each slice, of the same shape; see `Mask`. `None`, or
            `Slices.UNBOUNDED` in tensors and arrays, is no bound.

    >>> # A prefix of 2 tokens sees itself both ways, the other 3 are causal.
    >>> slices = Slices([(0, 2), (2, 5)], [(0, 2), (0, 5)], [(None, None), (None, 0)])
    >>> slices.tables[0].shape
    (2, 6)
    """

    UNBOUNDED = LARGEST

    def __init__(self, query_ranges: Any, key_ranges: Any, bands: Any) -> None:
        parts = [np.array(x, dtype=np.int64) for x in (query_ranges, key_ranges, _numbers(bands))]
        self._set(Slices.of_numbers(np.concatenate(parts, axis=-1)).tables)

    @classmethod
    def of_numbers(cls, content: np.ndarray) -> Slices:
        """Slices of a table `(N, 6)` or `(B, N, 6)` in which `LARGEST` is no bound."""
        tables = np.array(content, dtype=np.int64, ndmin=3)
        bands = tables[..., 4:]
        bands[bands >= LARGEST] = UNBOUNDED
        return cls.of_tables(tables)

    @cached_property
    def numbers(self) -> np.ndarray:
        """What `of_numbers` takes: `(N, 6)`, or `(B, N, 6)` filled up with empty slices, int32."""
        num_slices = max(map(len, self.tables), default=0)
        result = np.zeros((len(self.tables), num_slices, NUM_FIELDS), dtype=np.int32)
        for row, table in zip(result, self.tables, strict=True):
            row[: len(table)] = np.minimum(table, LARGEST)
        return result[0] if len(result) == 1 else result

    @classmethod
    def of_tables(cls, tables: Any) -> Slices:
        """Slices of one table `(N, 6)` for the whole batch, or of one for each batch row."""
        made = cls.__new__(cls)
        made._set(tables)
        return made

    def _set(self, tables: Any) -> None:
        self.tables: tuple[np.ndarray, ...] = tuple(map(_in_order, tables))
        """`(N, 6)` of each row, without empty slices, by begin of the queries, then of the keys."""
        for table in self.tables:
            table.setflags(write=False)  # the hash would not follow a change
        self._hash = hash(tuple(table.tobytes() for table in self.tables))

    def check(self, seq_len: int, key_seq_len: int) -> None:
        """Refuse slices that do not fit the sequences.

        Raises:
            ValueError: if a range ends after its sequence.
        """
        for table in self.tables:
            if len(table) and (table[:, 1].max() > seq_len or table[:, 3].max() > key_seq_len):
                raise ValueError(
                    f"slices must end at or before the sequence length {seq_len} (keys "
                    f"{key_seq_len}), got {table[:, :4].tolist()}"
                )

    @cached_property
    def are_windowed(self) -> bool:
        """Whether any query sees less far back than its slice goes."""
        # The last query of a slice looks back furthest.
        return any(bool((t[:, 4] < t[:, 1] - 1 - t[:, 2]).any()) for t in self.tables)

    @property
    def num_bytes(self) -> int:
        """Memory of the tables, in bytes."""
        return 64 + sum(table.nbytes for table in self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.tables)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Slices):
            return NotImplemented
        # The hash decides nearly all comparisons; content is read only where it agrees.
        if self._hash != other._hash or len(self) != len(other):
            return False
        return all(map(np.array_equal, self.tables, other.tables))

    def __reduce__(self) -> tuple[Any, ...]:
        return Slices.of_tables, (self.tables,)  # hashes of bytes differ between processes


def _numbers(bands: Any) -> Any:
    """The bands with a number for each bound that is `None`."""
    if isinstance(bands, (list, tuple)):
        return [_numbers(band) for band in bands]
    return LARGEST if bands is None else bands


def _in_order(table: Any) -> np.ndarray:
    """The slices that have queries and keys, in ascending order."""
    table = np.array(table, dtype=np.int64).reshape(-1, NUM_FIELDS)
    q_begin, q_end, k_begin, k_end, left, right = table.T
    table = table[(q_begin < q_end) & (k_begin < k_end) & (left + right >= 0)]
    return np.ascontiguousarray(table[np.lexsort((table[:, 2], table[:, 0]))])
