"""Tiles: rectangles that cover what the queries of one shard see of the keys of another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Run
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import Span, length, moved
from dtensor_ring.planning.slice_tables import UNBOUNDED


class QuerySlice(NamedTuple):
    """Queries of one run in one slice.

    Attributes:
        row: index in its shard at which the run begins.
        run: the run that holds the queries.
        span: indices of the queries in the run.
        keys: range of key positions that any of the queries may see.
        left: how many positions back a query sees, `None` if it hides no key of the slice.
        right: how many positions ahead, likewise.
    """

    row: int
    run: Run
    span: Span
    keys: Span
    left: int | None
    right: int | None


def query_slices_of(runs: Sequence[Run], table: np.ndarray) -> list[QuerySlice]:
    """Return the query slices of a shard in one batch row, without empty ones."""
    row, query_slices = 0, []
    # Slices are sorted by query begin. The running maximum of their ends also ascends, so both
    # ends of the range of slices near a run can be searched.
    latest = np.maximum.accumulate(table[:, 1]) if len(table) else table[:, 1]
    for run in runs:
        first = np.searchsorted(latest, run.start, "right")
        end = np.searchsorted(table[:, 0], run.last, "right")
        near = table[first:end]
        # After a long slice, the range also has slices that end before the run: drop them.
        query_slices += _cut(row, run, near[near[:, 1] > run.start])
        row += run.length
    return query_slices


def _cut(row: int, run: Run, table: np.ndarray) -> Iterator[QuerySlice]:
    for q_begin, q_end, k_begin, k_end, left, right in table.tolist():
        span = run.indices(q_begin, q_end)
        if not length(span):
            continue
        first, last = run.position(span[0]), run.position(span[1] - 1)
        # Drop bounds that exclude nothing, so kernels see fewer kinds of masks.
        behind = None if left == UNBOUNDED or left >= last - k_begin else left
        ahead = None if right == UNBOUNDED or right >= k_end - 1 - first else right
        begin = k_begin if behind is None else max(k_begin, first - behind)
        end = k_end if ahead is None else min(k_end, last + ahead + 1)
        if begin < end:
            yield QuerySlice(row, run, span, (begin, end), behind, ahead)


FULL = Mask.full()
CAUSAL = Mask.causal()


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of local queries and resident keys, with a band: one kernel launch computes it.

    `mask` is in indices of the tile: row i sees column j iff `i - left <= j <= i + right`. Every
    row sees a column, and every column is seen. A tile with a causal mask is square, so that
    kernels agree whether they align the diagonal top-left or bottom-right. A tile with a left bound
    has no more rows than these kernels support, see Note [Windows aligned bottom-right]. `batch`
    is the batch row, `None` for all of them.
    """

    rows: Span
    cols: Span
    mask: Mask
    batch: int | None = None

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs per batch row: the unit of work."""
        num_rows, num_cols = length(self.rows), length(self.cols)
        ahead = (
            0 if self.mask.right is None else _triangle(num_cols - 1 - self.mask.right, num_rows)
        )
        behind = 0 if self.mask.left is None else _triangle(num_rows - 1 - self.mask.left, num_cols)
        # Each bound hides a triangle in one corner, and the triangles do not overlap.
        return num_rows * num_cols - ahead - behind

    def on_cols(self, cols: Span) -> Tile:
        """Return the same tile with other numbers of its columns."""
        return replace(self, cols=cols)


def shard_tiles(
    query_slices: Sequence[QuerySlice], key_runs: tuple[Run, ...], batch: int | None = None
) -> list[Tile]:
    """Return the tiles that cover what the queries of one shard see of the keys of another.

    Args:
        query_slices: the queries, cut by slices, see `query_slices_of`.
        key_runs: runs of the other shard.
        batch: the batch row, `None` for all of them.
    """
    return coalesce(
        [tile for pair in _pairs(query_slices, key_runs) for tile in _tiles(pair, batch)]
    )


def tiles_by_run(
    query_slices: Sequence[QuerySlice], key_runs: tuple[Run, ...], batch: int | None = None
) -> Iterator[tuple[Run, Run, Tile]]:
    """Yield the tiles of each run of queries and run of keys, with both; none are joined."""
    for pair in _pairs(query_slices, key_runs):
        yield from ((pair.query_slice.run, pair.key, tile) for tile in _tiles(pair, batch))


class _Pair(NamedTuple):
    """A row, a column, and the queries and keys that meet there."""

    row: int
    col: int
    query_slice: QuerySlice
    key: Run
    span: Span


def _pairs(query_slices: Sequence[QuerySlice], key_runs: tuple[Run, ...]) -> list[_Pair]:
    """Return the pairs of queries and keys that may see each other, by row, then column."""
    keys = _placed(key_runs)
    pairs = [
        _Pair(query_slice.row + query_slice.span[0], col + span[0], query_slice, key, span)
        for query_slice in query_slices
        for col, key in _in_reach(query_slice.keys, keys)
        # A strided run may skip a short slice.
        if length(span := key.indices(*query_slice.keys))
    ]
    # `coalesce` joins neighbours in this order only.
    pairs.sort(key=lambda pair: pair[:2])
    return pairs


def packed_tiles(tiles: list[Tile], cols: Cols) -> list[Tile]:
    """Renumber the columns of a shard's tiles for a packet that has all columns they see."""
    # A packet that begins at column 0 and has no gap counts columns as the shard does.
    if not tiles or (cols.spans[0][0] == 0 and len(cols.spans) == 1):
        return tiles
    packed = [replace(tile, cols=cols.packed(tile.cols)) for tile in tiles]
    # Tiles may be adjacent now, as the packet lacks columns between them.
    return packed if len(cols.spans) == 1 else coalesce(packed)


def _tiles(pair: _Pair, batch: int | None) -> Iterator[Tile]:
    """Yield the tiles of a query slice and a span of a key run, moved to their row and column."""
    row, col, query_slice, key, span = pair
    left, right = _index_band(query_slice, key, span[0])
    for tile in _band_tiles(length(query_slice.span), length(span), left, right):
        yield Tile(moved(tile.rows, row), moved(tile.cols, col), tile.mask, batch)


def _placed(runs: tuple[Run, ...]) -> list[tuple[int, Run]]:
    """Return the runs of a shard, each after the index at which it begins."""
    starts = accumulate((run.length for run in runs), initial=0)
    return list(zip(starts, runs, strict=False))


def _in_reach(span: Span, keys: list[tuple[int, Run]]) -> Iterator[tuple[int, Run]]:
    """Yield the runs from the first to the last that may have positions of the span."""
    # Runs ascend, so those in reach are adjacent: skip to the first, stop after the last.
    first = bisect_left(keys, span[0], key=lambda placed: placed[1].last)
    for col, key in islice(keys, first, None):
        if key.start >= span[1]:
            return
        yield col, key


def _index_band(query_slice: QuerySlice, key: Run, key_index: int) -> tuple[int | None, int | None]:
    """Return the band of a query slice in indices, from its first query and the given key on."""
    # A bound may be negative: then the first rows or columns are empty.
    left, right, query = query_slice.left, query_slice.right, query_slice.run
    if left is None and right is None:
        return None, None
    # A single token has no stride, so the other run determines it.
    stride = key.stride if query.length == 1 else query.stride
    if stride != key.stride and key.length > 1:
        raise ValueError(f"runs of different strides have no common band: {query} and {key}")
    # The lag of the first query and key. Floor division drops lags that no two tokens have.
    offset = query.position(query_slice.span[0]) - key.position(key_index)
    left = None if left is None else (left - offset) // stride
    right = None if right is None else (right + offset) // stride
    return left, right


def _band_tiles(
    num_rows: int, num_cols: int, left: int | None, right: int | None
) -> Iterator[Tile]:
    """Yield tiles that cover a band, `i - left <= j <= i + right`, trimmed to what is visible."""
    if left is not None and right is not None and left + right < 0:
        return
    # Find rows that see any column, then columns that any of these rows sees.
    first_row = 0 if right is None else max(0, -right)
    end_row = num_rows if left is None else min(num_rows, num_cols + left)
    # The first row reaches furthest left, the last one furthest right.
    first_col = 0 if left is None else max(0, first_row - left)
    end_col = num_cols if right is None else min(num_cols, end_row + right)
    num_rows, num_cols = end_row - first_row, end_col - first_col
    if num_rows <= 0 or num_cols <= 0:
        return
    # Trimming moves the diagonal; drop a bound that no longer excludes any pair.
    shift = first_row - first_col
    left = None if left is None or left - shift >= num_rows - 1 else left - shift
    right = None if right is None or right + shift >= num_cols - 1 else right + shift
    for part in _band_parts(num_rows, num_cols, left, right):
        yield Tile(moved(part.rows, first_row), moved(part.cols, first_col), part.mask)


def _band_parts(
    num_rows: int, num_cols: int, left: int | None, right: int | None
) -> Iterator[Tile]:
    """Cut a trimmed band into tiles that satisfy the contract of `Tile`."""
    if left is None and right is not None:
        # Cut the trapezoid, as the causal flag of kernels needs squares.
        yield from _square_causal(num_rows, num_cols, right)
    elif left is not None and right is None and num_rows > num_cols:
        # Rows before the last num_cols see all columns; the rest is no taller than wide.
        # With 5 rows, 3 columns and left = 3, a tile that shows all, and a band below it:
        #     fff
        #     fff
        #     bbb
        #     bbb
        #     .bb
        excess = num_rows - num_cols
        yield Tile((0, excess), (0, num_cols), FULL)
        yield Tile((excess, num_rows), (0, num_cols), Mask(left - excess, None))
    elif left is not None and right is not None and num_rows + right >= 2 * num_cols:
        # Too tall for kernels that align the band at the last row, see the note on windows.
        for start, end in ((0, num_cols), (num_cols, num_rows)):
            for part in _band_tiles(end - start, num_cols, left - start, right + start):
                yield Tile(moved(part.rows, start), part.cols, part.mask)
    else:
        # Full, or a band that kernels support directly, see the note on windows.
        yield Tile((0, num_rows), (0, num_cols), Mask(left, right))


def _square_causal(num_rows: int, num_cols: int, right: int) -> Iterator[Tile]:
    """Cut a trapezoid, which has only a right bound, into full rectangles and a causal square."""
    # The first row sees `right` columns more than the diagonal; rows after the square see all.
    # With 4 rows, 5 columns and right = 2, three tiles: f, c (causal) and g.
    #     ffc..
    #     ffcc.
    #     ffccc
    #     ggggg
    square = num_cols - right
    if right:
        yield Tile((0, square), (0, right), FULL)
    yield Tile((0, square), (right, num_cols), CAUSAL)
    if num_rows > square:
        yield Tile((square, num_rows), (0, num_cols), FULL)


def coalesce(tiles: list[Tile]) -> list[Tile]:
    """Join neighbours whose union is a tile, to save launches and merges.

    Tiles arrive in the order of rows, then columns, so each can join only tiles before it.
    """
    joined: list[Tile] = []
    for tile in tiles:
        candidate: Tile | None = tile
        while candidate is not None:  # a union may join earlier tiles in turn
            tile = candidate
            candidate = _join_last(joined, tile)
        joined.append(tile)
    return joined


def _join_last(joined: list[Tile], tile: Tile) -> Tile | None:
    """Join `tile` with the last tiles of `joined` and remove those, or return `None`."""
    if not joined:
        return None
    last = joined[-1]
    if last.mask == tile.mask == FULL:
        # The tiles are side by side, or one above the other.
        if last.rows == tile.rows and last.cols[1] == tile.cols[0]:
            joined.pop()
            return replace(tile, cols=(last.cols[0], tile.cols[1]))
        if last.cols == tile.cols and last.rows[1] == tile.rows[0]:
            joined.pop()
            return replace(tile, rows=(last.rows[0], tile.rows[1]))
    # Two adjacent causal runs make a square, a rectangle and a square: one causal square.
    # Where one run ends and the next one begins, upper, corner and lower tile are:
    #     u...
    #     uu..
    #     ccl.
    #     ccll
    if len(joined) > 1 and _is_staircase(joined[-2], last, tile):
        del joined[-2:]
        return replace(
            tile,
            rows=(tile.rows[0] - length(last.cols), tile.rows[1]),
            cols=(last.cols[0], tile.cols[1]),
        )
    return None


def _is_staircase(upper: Tile, corner: Tile, lower: Tile) -> bool:
    """Return whether two causal squares and the rectangle between them form a causal square."""
    return (
        (upper.mask, corner.mask, lower.mask) == (CAUSAL, FULL, CAUSAL)
        and (corner.rows, corner.cols) == (lower.rows, upper.cols)
        and (upper.rows[1], upper.cols[1]) == (lower.rows[0], lower.cols[0])
    )


def _triangle(longest: int, num_terms: int) -> int:
    """Return `longest + (longest - 1) + ...`, at most `num_terms` terms, none below 1."""
    terms = max(0, min(longest, num_terms))  # positive terms only
    return terms * longest - terms * (terms - 1) // 2
