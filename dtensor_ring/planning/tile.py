"""Rectangles of queries and keys: what the queries of one shard see of the keys of another."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.run import Run

Span = tuple[int, int]
"""A half-open range of indices."""

NOTHING: Span = (0, 0)

Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Where documents begin and end: those of the queries, and those of the keys."""

FULL = Mask.full()
CAUSAL = Mask.causal()


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of local queries and resident keys, with a band: one kernel launch computes it.

    `mask` is in indices of the tile: row i sees column j iff `i - left <= j <= i + right`. Every
    row and every column of a tile sees or is seen. A tile whose mask is causal is square, so that
    kernels which align the diagonal top-left and bottom-right agree; one that is bounded on the
    left has no more rows than such kernels take, see Note [Windows aligned bottom-right]. `batch`
    is the batch row, `None` for all of them.
    """

    rows: Span
    cols: Span
    mask: Mask
    batch: int | None = None

    @property
    def area(self) -> int:
        """Visible (query, key) pairs per batch row: the unit of work."""
        num_rows, num_cols = length(self.rows), length(self.cols)
        ahead = (
            0 if self.mask.right is None else _triangle(num_cols - 1 - self.mask.right, num_rows)
        )
        behind = 0 if self.mask.left is None else _triangle(num_rows - 1 - self.mask.left, num_cols)
        # Each bound hides a triangle in a corner, and the band lies between the two.
        return num_rows * num_cols - ahead - behind


def shard_tiles(
    query_runs: tuple[Run, ...],
    key_runs: tuple[Run, ...],
    mask: Mask,
    bounds: Bounds,
    batch: int | None = None,
) -> list[Tile]:
    """The tiles that cover what the queries of one shard see of the keys of another.

    The chunks of the mask are among the bounds.
    """
    tiles: list[Tile] = []
    keys = _placed(key_runs)
    # Rows first, then columns: `_coalesce` joins neighbours in this order only.
    for row, query in _placed(query_runs):
        for col, key in _in_reach(query, keys, mask, bounds):
            for spans in _same_document(query, key, bounds, mask):
                for tile in _run_tiles(query, key, *spans):
                    rows, cols = moved(tile.rows, row), moved(tile.cols, col)
                    tiles.append(Tile(rows, cols, tile.mask, batch))
    return _coalesce(tiles)


def _placed(runs: tuple[Run, ...]) -> list[tuple[int, Run]]:
    """The runs of a shard, and where in it they begin."""
    starts = accumulate((run.length for run in runs), initial=0)
    return list(zip(starts, runs, strict=False))


def _in_reach(
    query: Run, keys: list[tuple[int, Run]], mask: Mask, bounds: Bounds
) -> Iterator[tuple[int, Run]]:
    """The runs between the first and the last key that a query of the run may see."""
    begin, end = _reach(query, mask, bounds)
    # Runs ascend, so those in reach are neighbours: skip to the first, stop after the last.
    first = bisect_left(keys, begin, key=lambda placed: placed[1].last)
    for col, key in islice(keys, first, None):
        if key.start >= end:
            return
        yield col, key


def _reach(query: Run, mask: Mask, bounds: Bounds) -> Span:
    """Positions from the first to the last key that a query of the run may see."""
    first, last = (bisect_right(bounds[0], x) - 1 for x in (query.start, query.last))
    num_documents = len(bounds[0]) - 1
    # Queries after the last boundary see nothing.
    if first >= num_documents:
        return NOTHING
    # No key of another document, and none outside of the band of the run's ends.
    begin, end = bounds[1][first], bounds[1][min(last, num_documents - 1) + 1]
    if mask.left is not None:
        begin = max(begin, query.start - mask.left)
    if mask.right is not None and mask.prefix is None:  # a prefix is seen from however far
        end = min(end, query.last + mask.right + 1)
    return begin, end


def _run_tiles(
    query: Run, key: Run, query_span: Span, key_span: Span, mask: Mask
) -> Iterator[Tile]:
    """The tiles of two index ranges of two runs, in indices of the runs."""
    band = _index_band(query, key, query_span[0], key_span[0], mask)
    for tile in _band_tiles(length(query_span), length(key_span), *band):
        yield Tile(moved(tile.rows, query_span[0]), moved(tile.cols, key_span[0]), tile.mask)


def _same_document(
    query: Run, key: Run, bounds: Bounds, mask: Mask
) -> Iterator[tuple[Span, Span, Mask]]:
    """Index ranges of the two runs, with a band, for each document that both hold tokens of."""
    # Documents that both runs span; one with gaps may still have no token in some of them.
    sides = tuple(zip(bounds, (query, key), strict=True))
    first = max(bisect_right(ends, run.start) - 1 for ends, run in sides)
    last = min(bisect_right(ends, run.last) - 1 for ends, run in sides)
    for document in range(first, min(last, len(bounds[0]) - 2) + 1):
        query_span = query.indices(bounds[0][document], bounds[0][document + 1])
        for begin, end, band in prefix_parts(bounds[1][document], bounds[1][document + 1], mask):
            # Strided runs may skip a short document altogether.
            key_span = key.indices(begin, end)
            if length(query_span) and length(key_span):
                yield query_span, key_span, band


def prefix_parts(begin: int, end: int, mask: Mask) -> Iterator[tuple[int, int, Mask]]:
    """The keys of a document in one piece, or its prefix and what follows it."""
    if not mask.prefix:  # by far the most frequent: no mask is made
        if begin < end:
            yield begin, end, mask
        return
    inner = min(begin + mask.prefix, end)
    if inner > begin:
        yield begin, inner, Mask(mask.left, None)
    if inner < end:
        yield inner, end, Mask(mask.left, mask.right)


def _index_band(
    query: Run, key: Run, query_index: int, key_index: int, mask: Mask
) -> tuple[int | None, int | None]:
    """The mask as a band of indices, counted from the given query and key.

    Bounds may be negative: then the first rows, or columns, see nothing.
    """
    if mask == FULL:
        return None, None
    # A single token has no stride of its own: the band is that of the other run.
    stride = key.stride if query.length == 1 else query.stride
    if stride != key.stride and key.length > 1:
        raise ValueError(f"runs of different strides have no common band: {query} and {key}")
    # The lag of the first query and key; floor division drops lags that no two tokens have.
    offset = query.position(query_index) - key.position(key_index)
    left = None if mask.left is None else (mask.left - offset) // stride
    right = None if mask.right is None else (mask.right + offset) // stride
    return left, right


def _band_tiles(
    num_rows: int, num_cols: int, left: int | None, right: int | None
) -> Iterator[Tile]:
    """Cover the band `i - left <= j <= i + right` of a rectangle, trimmed to what is visible."""
    if left is not None and right is not None and left + right < 0:
        return
    # Rows that see any column, then columns that any of those rows sees.
    first_row = 0 if right is None else max(0, -right)
    end_row = num_rows if left is None else min(num_rows, num_cols + left)
    # The first row reaches furthest left, the last one furthest right.
    first_col = 0 if left is None else max(0, first_row - left)
    end_col = num_cols if right is None else min(num_cols, end_row + right)
    num_rows, num_cols = end_row - first_row, end_col - first_col
    if num_rows <= 0 or num_cols <= 0:
        return
    # Trimming moves the diagonal; a bound that no pair reaches any more is none.
    shift = first_row - first_col
    left = None if left is None or left - shift >= num_rows - 1 else left - shift
    right = None if right is None or right + shift >= num_cols - 1 else right + shift
    for part in _parts(num_rows, num_cols, left, right):
        yield Tile(moved(part.rows, first_row), moved(part.cols, first_col), part.mask)


def _parts(num_rows: int, num_cols: int, left: int | None, right: int | None) -> Iterator[Tile]:
    """Cut a trimmed band into tiles that keep what `Tile` promises."""
    if left is None and right is not None:
        # A trapezoid: the causal flag of kernels needs squares.
        yield from _square_causal(num_rows, num_cols, right)
    elif left is not None and right is None and num_rows > num_cols:
        # Rows before the last num_cols see all columns: below them the tile is no taller than wide.
        excess = num_rows - num_cols
        yield Tile((0, excess), (0, num_cols), FULL)
        yield Tile((excess, num_rows), (0, num_cols), Mask(left - excess, None))
    elif left is not None and right is not None and num_rows + right >= 2 * num_cols:
        # Too tall for kernels that align the band at the last row: see the note on windows.
        for start, end in ((0, num_cols), (num_cols, num_rows)):
            for part in _band_tiles(end - start, num_cols, left - start, right + start):
                yield Tile(moved(part.rows, start), part.cols, part.mask)
    else:
        # Full, or a band that kernels take as it is: see the note on windows.
        yield Tile((0, num_rows), (0, num_cols), Mask(left, right))


def _square_causal(num_rows: int, num_cols: int, right: int) -> Iterator[Tile]:
    """Cut a trapezoid, which has only a right bound, into full rectangles and a causal square."""
    # The first row sees `right` columns more than the diagonal; rows after the square see all.
    square = num_cols - right
    if right:
        yield Tile((0, square), (0, right), FULL)
    yield Tile((0, square), (right, num_cols), CAUSAL)
    if num_rows > square:
        yield Tile((square, num_rows), (0, num_cols), FULL)


def _coalesce(tiles: list[Tile]) -> list[Tile]:
    """Join neighbours whose union is again a tile: fewer launches and fewer merges.

    Tiles arrive ordered by rows, then columns, so each one can only join tiles before it.
    """
    joined: list[Tile] = []
    for tile in tiles:
        candidate: Tile | None = tile
        while candidate is not None:  # a union may join with what lies before it
            tile = candidate
            candidate = _join_last(joined, tile)
        joined.append(tile)
    return joined


def _join_last(joined: list[Tile], tile: Tile) -> Tile | None:
    """Join `tile` with the tiles at the end of `joined`, which are taken off, if possible."""
    if not joined:
        return None
    last = joined[-1]
    if last.mask == tile.mask == FULL:
        # Side by side, or one above the other.
        if last.rows == tile.rows and last.cols[1] == tile.cols[0]:
            joined.pop()
            return replace(tile, cols=(last.cols[0], tile.cols[1]))
        if last.cols == tile.cols and last.rows[1] == tile.rows[0]:
            joined.pop()
            return replace(tile, rows=(last.rows[0], tile.rows[1]))
    # Two causal runs in a row make a square, a rectangle and a square: one causal square.
    if len(joined) > 1 and _is_staircase(joined[-2], last, tile):
        del joined[-2:]
        return replace(
            tile,
            rows=(tile.rows[0] - length(last.cols), tile.rows[1]),
            cols=(last.cols[0], tile.cols[1]),
        )
    return None


def _is_staircase(upper: Tile, corner: Tile, lower: Tile) -> bool:
    """Whether two causal squares and the rectangle below and left of them are one causal square."""
    return (
        (upper.mask, corner.mask, lower.mask) == (CAUSAL, FULL, CAUSAL)
        and (corner.rows, corner.cols) == (lower.rows, upper.cols)
        and (upper.rows[1], upper.cols[1]) == (lower.rows[0], lower.cols[0])
    )


def length(span: Span) -> int:
    """Indices in a span."""
    return span[1] - span[0]


def moved(span: Span, by: int) -> Span:
    """The span, moved by that many indices."""
    return span[0] + by, span[1] + by


def _triangle(longest: int, num_terms: int) -> int:
    """`longest + (longest - 1) + ...`, at most `num_terms` terms, none below 1."""
    terms = max(0, min(longest, num_terms))  # those above zero
    return terms * longest - terms * (terms - 1) // 2
