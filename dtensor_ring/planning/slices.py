"""What queries see, as slices: a range of queries, a range of keys and a band between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from dtensor_ring.planning.builder_inputs import slices_given, unbounded
from dtensor_ring.planning.builders import Builders, PartBuilders
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.ranges import (
    MAX_TOKENS,
    FrozenArrays,
    SupportsArray,
    as_count,
    as_int,
    broadcast,
    numbered,
)
from dtensor_ring.planning.slice_tables import (
    LARGEST,
    NUM_FIELDS,
    UNBOUNDED,
    RangeArray,
    check_count,
    chunks,
    masked_table,
)


class Overlap(NamedTuple):
    """Two slices, as rows of a table, and a query and a key that are in both."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    query: int
    key: int


def find_overlap(table: np.ndarray) -> Overlap | None:
    """Return one overlap of the slices `(N, 6)`, or `None` if they are disjoint.

    Raises:
        ValueError: if too many pairs of slices would have to be compared.
    """
    # Only slices that lie near one another are compared: there are too many pairs.
    for first, second in _near(table):
        lowest, highest = _common(first, second)
        # Each lag of the last range belongs to a pair of the rectangle, so that three ranges
        # decide, and no pair of positions is looked at.
        meet = (lowest <= highest).all(axis=0)
        if meet.any():
            at = int(meet.argmax())
            query, key = _pair(lowest[:, at])
            return Overlap(tuple(first[at].tolist()), tuple(second[at].tolist()), query, key)
    return None


def _common(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and highest query, key and lag that both slices may have, `(3, N)` each."""
    begin_q, end_q, begin_k, end_k, left, right = first.T
    others = second.T
    lowest_q, highest_q = np.maximum(begin_q, others[0]), np.minimum(end_q, others[1]) - 1
    lowest_k, highest_k = np.maximum(begin_k, others[2]), np.minimum(end_k, others[3]) - 1
    # A rectangle has all lags between those of its two corners.
    lowest_lag = np.maximum(np.maximum(-right, -others[5]), lowest_q - highest_k)
    highest_lag = np.minimum(np.minimum(left, others[4]), highest_q - lowest_k)
    return (
        np.stack([lowest_q, lowest_k, lowest_lag]),
        np.stack([highest_q, highest_k, highest_lag]),
    )


def _pair(lowest: np.ndarray) -> tuple[int, int]:
    """Return a query and a key of a rectangle that have the lowest lag."""
    lag = int(lowest[2])
    query = max(int(lowest[0]), int(lowest[1]) + lag)
    return query, query - lag


# The largest number of pairs of slices that are compared at once.
CHUNK = 2**18

# The largest number of pairs of slices that are compared in all; they take a few seconds.
MAX_PAIRS = 2**25


def _near(table: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of slices that share queries, keys or lags; the axis with the fewest is used."""
    lowest, highest = _common(table, table)
    is_seen = (lowest <= highest).all(axis=0)
    table, lowest, highest = table[is_seen], lowest[:, is_seen], highest[:, is_seen]
    orders = [np.argsort(x, kind="stable") for x in lowest]
    # Sorted by begin, the slices that meet one follow it, up to the first that begins after it.
    counts = [
        np.searchsorted(low[order], high[order], "right") - np.arange(1, len(order) + 1)
        for low, high, order in zip(lowest, highest, orders, strict=True)
    ]
    axis = int(np.argmin([x.sum() for x in counts]))
    table, count = table[orders[axis]], counts[axis]
    ends = np.cumsum(count)
    if len(ends) and ends[-1] > MAX_PAIRS:
        raise ValueError(
            f"slices must be disjoint, and {len(table):,} of them have queries, keys and lags in "
            f"common in {ends[-1]:,} ways, of which {MAX_PAIRS:,} can be looked at; larger slices "
            "are fewer"
        )
    begin = 0
    while begin < len(table):
        # Take slices until the chunk is full, but at least one.
        so_far = ends[begin] - count[begin]
        end = max(begin + 1, int(np.searchsorted(ends, so_far + CHUNK, "right")))
        first, number = numbered(count[begin:end])
        yield table[begin + first], table[begin + first + 1 + number]
        begin = end


# The largest number of queries, or of keys, in a drawing.
MAX_DRAWN = 64

# The largest number of slices that are listed, summed over all rows.
MAX_LISTED = 32


def shown(row: Sequence[int]) -> str:
    """Describe a slice in a message."""
    q_begin, q_end, k_begin, k_end, *bounds = row
    left, right = (None if bound >= LARGEST else bound for bound in bounds)
    return f"queries {q_begin} to {q_end}, keys {k_begin} to {k_end}, left {left}, right {right}"


def drawn(tables: Sequence[np.ndarray]) -> str:
    """Draw a character for each query (down) and key (across): `#` if seen, else `.`."""
    if not tables:
        return "no batch rows"
    num_queries, num_keys = (max(_end(table, side) for table in tables) for side in (1, 3))
    if not num_queries:
        return "nothing is seen"
    if max(num_queries, num_keys) > MAX_DRAWN:
        return listed(tables)
    pictures = ["\n".join(_lines(seen(table, num_queries, num_keys))) for table in tables]
    if len(pictures) == 1:
        return pictures[0]
    return "\n".join(f"row {number}:\n{picture}" for number, picture in enumerate(pictures))


def _end(table: np.ndarray, side: int) -> int:
    return int(table[:, side].max(initial=0))


def _lines(cells: np.ndarray) -> Iterator[str]:
    for row in cells:
        yield "".join("#" if cell else "." for cell in row)


def seen(table: np.ndarray, num_queries: int, num_keys: int) -> np.ndarray:
    """Return whether each query sees each key, booleans `(num_queries, num_keys)`."""
    cells = np.zeros((num_queries, num_keys), dtype=bool)
    lag = np.arange(num_queries)[:, None] - np.arange(num_keys)
    for q_begin, q_end, k_begin, k_end, left, right in table.tolist():
        part = slice(q_begin, q_end), slice(k_begin, k_end)
        cells[part] |= (lag[part] <= left) & (-lag[part] <= right)
    return cells


def listed(tables: Sequence[np.ndarray]) -> str:
    """List the first slices, and say how many more there are."""
    lines = [
        f"row {number}: {shown(row)}" if len(tables) > 1 else shown(row)
        for number, table in enumerate(tables)
        for row in table
    ]
    if len(lines) > MAX_LISTED:
        lines[MAX_LISTED:] = [f"and {len(lines) - MAX_LISTED} more"]
    return "\n".join(lines)


# Pairs of integers: begins and ends.
Ranges = SupportsArray | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]

# Pairs of integers or `None`: left and right bounds.
Band = Sequence[int | None]
Bands = SupportsArray | Sequence[Band] | Sequence[Sequence[Band]]


class Slices(Builders, PartBuilders, FrozenArrays):
    """Disjoint slices: one list of them for the whole batch, or one for each batch row.

    Query position q sees key position k if one slice has q among its queries, k among its keys, and
    `-right <= q - k <= left`. Bounds may be negative: `(-1, None)` are strictly later keys. A pair
    must not be in two slices, as it would count twice; attention refuses it. Slices are immutable,
    and equal by content.

    `str` draws what is seen, queries down and keys across. The class methods build the slices of
    masks that models use.

    Args:
        query_ranges: `(N, 2)` or `(B, N, 2)`: begin and end of the queries of each slice, in global
            positions; a tensor on the CPU, an array or a sequence of integers.
        key_ranges: begin and end of the keys of each slice, in the same shape.
        bands: `left` and `right` of each slice, in the same shape; see `Mask`. `None`, or
            `Slices.UNBOUNDED` in tensors and arrays, is no bound.

    Raises:
        ValueError: if shapes differ, a range ends before it begins, a position is negative, or a
            number is beyond int32.
        TypeError: if anything but integers is given.

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
        """Build slices from a table `(N, 6)` or `(B, N, 6)` in which `LARGEST` is no bound.

        Raises:
            ValueError: if a position is negative, or a range ends before it begins.
        """
        return cls.of_tables(unbounded(content))

    @cached_property
    def numbers(self) -> np.ndarray:
        """The table for `of_numbers`: `(N, 6)`, or `(B, N, 6)` padded with empty slices, int32."""
        num_slices = max(map(len, self.tables), default=0)
        result = np.zeros((len(self.tables), num_slices, NUM_FIELDS), dtype=np.int32)
        for row, table in zip(result, self.tables, strict=True):
            # No position is beyond int32, so neither is a lag: clipping hides or shows no pair.
            row[: len(table)] = np.clip(table, -LARGEST, LARGEST)
        return result[0] if len(result) == 1 else result

    @classmethod
    def of_tables(cls, tables: Any) -> Self:
        """Build slices from a table `(N, 6)` for the whole batch, or one for each batch row."""
        made = cls.__new__(cls)
        is_one = isinstance(tables, np.ndarray) and tables.ndim == 2
        made._set([tables] if is_one else tables)
        return made

    @classmethod
    def batched(cls, parts: Sequence[Slices]) -> Self:
        """Concatenate the batch rows of several slices, so that rows may use different builders.

        Raises:
            TypeError: if `parts` is not a sequence of `Slices`.

        >>> len(Slices.batched([Slices.prefix([0, 8], 3), Slices.block_causal([4, 4])]))
        2
        """
        if not isinstance(parts, Sequence) or not all(isinstance(part, Slices) for part in parts):
            raise TypeError(f"parts must be a sequence of Slices, got {parts!r}")
        return cls.of_tables([table for part in parts for table in part.tables])

    def _set(self, tables: Any) -> None:
        # One `(N, 6)` for each row, without empty slices, sorted by query begin, then key begin.
        self.tables = self._freeze(map(_in_order, tables))

    def check(self, seq_len: int, key_seq_len: int) -> None:
        """Refuse slices that cannot be planned for sequences of these lengths.

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
        """A batch row and an overlap in it. It is cached, as every plan of every rank reads it."""
        for row, table in enumerate(self.tables):
            found = find_overlap(table)
            if found is not None:
                return row, found
        return None

    def _where(self, row: int) -> str:
        return f"in batch row {row}" if len(self.tables) > 1 else "for all batch rows"

    def sees(self, query: int, key: int, row: int = 0) -> bool:
        """Return whether the query at one position sees the key at another, in a batch row.

        Raises:
            TypeError: if a number is not an integer.
            ValueError: if there is no such batch row.
        """
        # A single table serves every row.
        is_one = len(self.tables) == 1
        row = as_count("row", row, 0, MAX_TOKENS if is_one else len(self.tables) - 1)
        lag = as_int("query", query) - as_int("key", key)
        q_begin, q_end, k_begin, k_end, left, right = self.tables[0 if is_one else row].T
        inside = (q_begin <= query) & (query < q_end) & (k_begin <= key) & (key < k_end)
        return bool((inside & (lag <= left) & (-lag <= right)).any())

    def shifted(self, by: int, key_by: int | None = None) -> Slices:
        """Return the slices, shifted to later positions.

        Args:
            by: number of positions by which queries shift, negative for earlier ones.
            key_by: number of positions by which keys shift; `by` is the default.

        Raises:
            ValueError: if a position would be negative or beyond int32.
            TypeError: if a number is not an integer.

        >>> print(Slices.block_causal([1, 1]).shifted(0, key_by=1))
        .#.
        .##
        """
        by = as_count("by", by, -LARGEST, LARGEST)
        key_by = by if key_by is None else as_count("key_by", key_by, -LARGEST, LARGEST)
        # Lags change by how much further queries move than keys.
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
            # No bound stays none, wherever the slice is.
            tables.append(np.where(table == UNBOUNDED, UNBOUNDED, later))
        return Slices.of_tables(tables)

    def __or__(self, other: Slices) -> Slices:
        """Return the union of slices that have no pair in common.

        Raises:
            ValueError: if both have batch rows, and the numbers of rows differ.

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
        """Whether a left bound hides keys of a slice from any of its queries."""
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
    """Return the slices that are not empty, sorted by query begin, then key begin."""
    table = np.array(table, dtype=np.int64).reshape(-1, NUM_FIELDS)
    q_begin, q_end, k_begin, k_end, left, right = table.T
    table = table[(q_begin < q_end) & (k_begin < k_end) & (left + right >= 0)]
    # Slices given in another order are the same value, and find the same plan in the cache.
    return np.ascontiguousarray(table[np.lexsort((table[:, 2], table[:, 0]))])


# Batch rows, `None` for all of them, each with its table of `Slices`.
Rows = tuple[tuple[int | None, np.ndarray], ...]


def rows_of(slices: Slices) -> Rows:
    """Return the batch rows of slices; a single table covers all rows in one launch."""
    if len(slices) == 1:
        return ((None, slices.tables[0]),)
    return tuple(enumerate(slices.tables))


@cached_bytes(2**26, lambda slices: slices.num_bytes)
def slices_of(
    mask: Mask,
    seq_lens: tuple[int, int],
    documents: Documents | None = None,
    key_documents: Documents | None = None,
) -> Slices:
    """Return the slices of a mask within documents; a cache keeps at most 64 MiB of them.

    Args:
        mask: the mask. Its chunks cut the documents, and its prefix becomes a slice.
        seq_lens: global lengths of queries and of keys.
        documents: boundaries of the queries; without any, the sequence is one document.
        key_documents: boundaries of the keys; `documents` by default.
    """
    queries, keys = (
        # An empty batch has no boundaries; it counts as one document, which nothing reads.
        [_ranges(row, mask.chunk) for row in (given.arrays if given else ((0, seq_len),))]
        for seq_len, given in zip(seq_lens, (documents, key_documents or documents), strict=True)
    )
    rows = broadcast(cu_seqlens=queries, key_cu_seqlens=keys)
    return Slices.of_tables(
        [masked_table(of_queries, of_keys, mask) for of_queries, of_keys in rows]
    )


def _ranges(row: Sequence[int] | np.ndarray, chunk: int | None) -> RangeArray:
    """Return the begins and ends of documents, or of the chunks within them."""
    bounds = np.asarray(row, dtype=np.int64)
    begins, ends = bounds[:-1], bounds[1:]
    return (begins, ends) if chunk is None else chunks(begins, ends, chunk)
