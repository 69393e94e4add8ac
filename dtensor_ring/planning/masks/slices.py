"""What queries see, as slices: a range of queries, a range of keys, and a band between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np

from dtensor_ring.planning.masks.builders import Builders
from dtensor_ring.planning.masks.given import slices_given, unbounded
from dtensor_ring.planning.masks.overlap import Overlap, find_overlap
from dtensor_ring.planning.masks.part_builders import PartBuilders
from dtensor_ring.planning.masks.picture import drawn, shown
from dtensor_ring.planning.masks.tables import LARGEST, NUM_FIELDS, UNBOUNDED, check_count
from dtensor_ring.planning.values.broadcast import broadcast
from dtensor_ring.planning.values.count import as_count, as_int
from dtensor_ring.planning.values.frozen import FrozenArrays
from dtensor_ring.planning.values.integers import SupportsArray

Ranges = SupportsArray | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]
"""Pairs of integers."""

Band = Sequence[int | None]
Bands = SupportsArray | Sequence[Band] | Sequence[Sequence[Band]]
"""Pairs of integers, or `None`."""


class Slices(Builders, PartBuilders, FrozenArrays):
    """Disjoint slices: one list of them for the whole batch, or one for each batch row.

    Query position q sees key position k if one slice has q among its queries, k among its keys, and
    `-right <= q - k <= left`. Bounds may be negative: `(-1, None)` are strictly later keys. No
    pair may be in two slices, as it would count twice: attention refuses it. Equal by content, and
    never changed.

    `str` draws what is seen, queries down and keys across. The class methods make slices of the
    masks that models use.

    Args:
        query_ranges: `(N, 2)` or `(B, N, 2)`: begin and end of the queries of each slice, in global
            positions; a tensor on the CPU, an array or a sequence of integers.
        key_ranges: those of the keys, of the same shape.
        bands: `left` and `right` of each slice, of the same shape; see `Mask`. `None`, or
            `Slices.UNBOUNDED` in tensors and arrays, is no bound.

    Raises:
        ValueError: if shapes differ, a range ends before it begins, or a number is negative where
            it is a position, or beyond int32.
        TypeError: if something else than integers is given.

    >>> # A prefix of 2 tokens sees itself both ways, the other 3 are causal.
    >>> slices = Slices([(0, 2), (2, 5)], [(0, 2), (0, 5)], [(None, None), (None, 0)])
    >>> slices == Slices.prefix([0, 5], 2), slices.sees(0, 1), slices.sees(2, 3)
    (True, True, False)
    """

    UNBOUNDED = LARGEST

    def __init__(self, query_ranges: Ranges, key_ranges: Ranges, bands: Bands) -> None:
        self._set(unbounded(slices_given(query_ranges, key_ranges, bands)))

    @classmethod
    def of_numbers(cls, content: np.ndarray) -> Slices:
        """Slices of a table `(N, 6)` or `(B, N, 6)` in which `LARGEST` is no bound.

        Raises:
            ValueError: if a position is negative, or a range ends before it begins.
        """
        return cls.of_tables(unbounded(content))

    @cached_property
    def numbers(self) -> np.ndarray:
        """What `of_numbers` takes: `(N, 6)`, or `(B, N, 6)` filled up with empty slices, int32."""
        num_slices = max(map(len, self.tables), default=0)
        result = np.zeros((len(self.tables), num_slices, NUM_FIELDS), dtype=np.int32)
        for row, table in zip(result, self.tables, strict=True):
            # No lag is beyond int32, as no position is.
            row[: len(table)] = np.clip(table, -LARGEST, LARGEST)
        return result[0] if len(result) == 1 else result

    @classmethod
    def of_tables(cls, tables: Any) -> Self:
        """Slices of one table `(N, 6)` for the whole batch, or of one for each batch row."""
        made = cls.__new__(cls)
        is_one = isinstance(tables, np.ndarray) and tables.ndim == 2
        made._set([tables] if is_one else tables)
        return made

    @classmethod
    def batched(cls, parts: Sequence[Slices]) -> Self:
        """The batch rows of several, one after the other: rows may be masked by different builders.

        Raises:
            TypeError: if parts are something else.

        >>> len(Slices.batched([Slices.prefix([0, 8], 3), Slices.block_causal([4, 4])]))
        2
        """
        if not isinstance(parts, Sequence) or not all(isinstance(part, Slices) for part in parts):
            raise TypeError(f"parts must be a sequence of Slices, got {parts!r}")
        return cls.of_tables([table for part in parts for table in part.tables])

    def _set(self, tables: Any) -> None:
        self.tables = self._freeze(map(_in_order, tables))
        """`(N, 6)` of each row, without empty slices, by begin of the queries, then of the keys."""

    def check(self, seq_len: int, key_seq_len: int) -> None:
        """Refuse slices that cannot be planned for such sequences.

        Raises:
            ValueError: if a range ends after its sequence, a pair is in two slices, or there are
                too many slices.
        """
        check_count(sum(map(len, self.tables)))
        for row, table in enumerate(self.tables):
            late = (table[:, 1] > seq_len) | (table[:, 3] > key_seq_len)
            if late.any():
                raise ValueError(
                    f"slices must end at or before the sequence length {seq_len} (keys "
                    f"{key_seq_len}), got {shown(table[late.argmax()])} {self._where(row)}"
                )
        if self._overlap is not None:
            row, (first, second, query, key) = self._overlap
            raise ValueError(
                f"slices must be disjoint, got {shown(first)} and {shown(second)} "
                f"{self._where(row)}: query {query} sees key {key} in both, which would count twice"
            )

    @cached_property
    def _overlap(self) -> tuple[int, Overlap] | None:
        """A batch row and an overlap in it. All plans of all ranks ask for it."""
        for row, table in enumerate(self.tables):
            found = find_overlap(table)
            if found is not None:
                return row, found
        return None

    def _where(self, row: int) -> str:
        return f"in batch row {row}" if len(self.tables) > 1 else "for all batch rows"

    def sees(self, query: int, key: int, row: int = 0) -> bool:
        """Whether the query at one position sees the key at another, in a batch row.

        Raises:
            TypeError: if one is not an integer.
            ValueError: if there is no such batch row.
        """
        # One table is that of any row.
        is_one = len(self.tables) == 1
        row = as_count("row", row, 0, *([] if is_one else [len(self.tables) - 1]))
        lag = as_int("query", query) - as_int("key", key)
        q_begin, q_end, k_begin, k_end, left, right = self.tables[0 if is_one else row].T
        inside = (q_begin <= query) & (query < q_end) & (k_begin <= key) & (key < k_end)
        return bool((inside & (lag <= left) & (-lag <= right)).any())

    def shifted(self, by: int, key_by: int | None = None) -> Slices:
        """The same, for sequences that begin at a later position.

        Args:
            by: how many positions later, or earlier if it is negative.
            key_by: the same of the keys, by default as for the queries.

        Raises:
            ValueError: if a position would be negative.
            TypeError: if a number is not an integer.

        >>> print(Slices.block_causal([1, 1]).shifted(0, key_by=1))
        .#.
        .##
        """
        by = as_count("by", by, -LARGEST, LARGEST)
        key_by = by if key_by is None else as_count("key_by", key_by, -LARGEST, LARGEST)
        ahead = by - key_by
        moved = [by, by, key_by, key_by, ahead, -ahead]
        tables = []
        for table in self.tables:
            later = table + moved
            beyond = ((later[:, :4] < 0) | (later[:, :4] > LARGEST)).any(axis=1)
            if beyond.any():
                raise ValueError(
                    f"slices would begin before position 0, by={by}, key_by={key_by}, or end "
                    f"after int32, got {shown(table[beyond.argmax()])}"
                )
            tables.append(np.where(table == UNBOUNDED, UNBOUNDED, later))
        return Slices.of_tables(tables)

    def __or__(self, other: Slices) -> Slices:
        """What one or the other shows, of slices that have no pair in common.

        Raises:
            ValueError: if both have batch rows, and not as many.

        >>> print(Slices.block_causal([2]) | Slices.prefix([0, 3], 1).shifted(2))
        ##...
        ##...
        ..#..
        ..##.
        ..###
        """
        if not isinstance(other, Slices):
            return NotImplemented
        rows = broadcast(left=self.tables, right=other.tables)
        return Slices.of_tables([np.concatenate(both) for both in rows])

    @cached_property
    def are_windowed(self) -> bool:
        """Whether any query sees less far back than its slice goes."""
        # The last query of a slice looks back furthest.
        return any(bool((t[:, 4] < t[:, 1] - 1 - t[:, 2]).any()) for t in self.tables)

    @property
    def num_bytes(self) -> int:
        """Memory of the tables, in bytes."""
        return 64 + sum(table.nbytes for table in self.tables)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.tables)

    def __reduce__(self) -> tuple[Any, ...]:
        return Slices.of_tables, (self.tables,)  # hashes of bytes differ between processes

    def __repr__(self) -> str:
        rows = "all batch rows" if len(self) == 1 else f"{len(self)} batch rows"
        return f"<{sum(map(len, self.tables))} slices of {rows}>"

    def __str__(self) -> str:
        return drawn(self.tables)


def _in_order(table: Any) -> np.ndarray:
    """The slices that have queries and keys, in ascending order."""
    table = np.array(table, dtype=np.int64).reshape(-1, NUM_FIELDS)
    q_begin, q_end, k_begin, k_end, left, right = table.T
    table = table[(q_begin < q_end) & (k_begin < k_end) & (left + right >= 0)]
    return np.ascontiguousarray(table[np.lexsort((table[:, 2], table[:, 0]))])
