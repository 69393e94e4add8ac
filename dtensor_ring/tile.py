"""Rectangles of queries and keys: what the queries of one shard see of the keys of another."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from dtensor_ring.layout import Run
from dtensor_ring.mask import Mask

Span = tuple[int, int]
"""A half-open range of indices."""

NOTHING: Span = (0, 0)

Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Where documents begin and end: those of the queries, and those of the keys."""

FULL = Mask.full()
CAUSAL = Mask.causal()


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of local queries and held keys, with a band: what one kernel launch computes.

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
    for row, query in _placed(query_runs):
        for col, key in _in_reach(query, keys, mask, bounds):
            for spans in _same_document(query, key, bounds, mask):
                for tile in _run_tiles(query, key, *spans):
                    rows, cols = moved(tile.rows, row), moved(tile.cols, col)
                    tiles.append(Tile(rows, cols, tile.mask, batch))
    return _coalesce(tiles)


def seen_cols(
    query_runs: tuple[Run, ...], key_runs: tuple[Run, ...], mask: Mask, bounds: Bounds
) -> Span:
    """The columns of one shard from the first to the last that the queries of another see.

    As `shard_tiles` would tell, but it looks at the first and the last document only.
    """
    seen: list[Span] = []
    keys = _placed(key_runs)
    for query in query_runs:
        for col, key in _in_reach(query, keys, mask, bounds):
            for backwards in (False, True):
                for spans in _same_document(query, key, bounds, mask, backwards):
                    tiles = list(_run_tiles(query, key, *spans))
                    seen += [moved(tile.cols, col) for tile in tiles]
                    if tiles:
                        break
    return hull(seen)


def _placed(runs: tuple[Run, ...]) -> list[tuple[int, Run]]:
    """The runs of a shard, and where in it they begin."""
    starts = accumulate((run.length for run in runs), initial=0)
    return list(zip(starts, runs, strict=False))


def _in_reach(
    query: Run, keys: list[tuple[int, Run]], mask: Mask, bounds: Bounds
) -> Iterator[tuple[int, Run]]:
    """The runs between the first and the last key that a query of the run may see."""
    begin, end = _reach(query, mask, bounds)
    first = bisect_left(keys, begin, key=lambda placed: placed[1].last)
    for col, key in islice(keys, first, None):
        if key.start >= end:
            return
        yield col, key


def _reach(query: Run, mask: Mask, bounds: Bounds) -> Span:
    """Positions from the first key that a query of the run may see to the last."""
    first, last = (bisect_right(bounds[0], x) - 1 for x in (query.start, query.last))
    num_documents = len(bounds[0]) - 1
    if first >= num_documents:
        return NOTHING
    begin, end = bounds[1][first], bounds[1][min(last, num_documents - 1) + 1]
    if mask.left is not None:
        begin = max(begin, query.start - mask.left)
    if mask.right is not None and mask.prefix is None:
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
    query: Run, key: Run, bounds: Bounds, mask: Mask, backwards: bool = False
) -> Iterator[tuple[Span, Span, Mask]]:
    """Index ranges of the two runs, with a band, for each document that both hold tokens of."""
    sides = tuple(zip(bounds, (query, key), strict=True))
    first = max(bisect_right(ends, run.start) - 1 for ends, run in sides)
    last = min(bisect_right(ends, run.last) - 1 for ends, run in sides)
    documents = range(first, min(last, len(bounds[0]) - 2) + 1)
    for document in reversed(documents) if backwards else documents:
        query_span = query.indices(bounds[0][document], bounds[0][document + 1])
        parts = list(_prefix_parts(bounds[1][document], bounds[1][document + 1], mask))
        for begin, end, band in reversed(parts) if backwards else parts:
            key_span = key.indices(begin, end)
            if length(query_span) and length(key_span):
                yield query_span, key_span, band


def _prefix_parts(begin: int, end: int, mask: Mask) -> Iterator[tuple[int, int, Mask]]:
    """The keys of a document in one piece, or its prefix and what follows it."""
    inner = min(begin + (mask.prefix or 0), end)
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
    stride = key.stride if query.length == 1 else query.stride
    if stride != key.stride and key.length > 1:
        raise ValueError(f"runs of different strides have no common band: {query} and {key}")
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
    first_row = 0 if right is None else max(0, -right)
    end_row = num_rows if left is None else min(num_rows, num_cols + left)
    first_col = 0 if left is None else max(0, first_row - left)
    end_col = num_cols if right is None else min(num_cols, end_row + right)
    num_rows, num_cols = end_row - first_row, end_col - first_col
    if num_rows <= 0 or num_cols <= 0:
        return
    shift = first_row - first_col
    left = None if left is None or left - shift >= num_rows - 1 else left - shift
    right = None if right is None or right + shift >= num_cols - 1 else right + shift
    for part in _parts(num_rows, num_cols, left, right):
        yield Tile(moved(part.rows, first_row), moved(part.cols, first_col), part.mask)


def _parts(num_rows: int, num_cols: int, left: int | None, right: int | None) -> Iterator[Tile]:
    """Cut a trimmed band into tiles that keep what `Tile` promises."""
    if left is None and right is not None:
        yield from _square_causal(num_rows, num_cols, right)
    elif left is not None and right is None and num_rows > num_cols:
        excess = num_rows - num_cols
        yield Tile((0, excess), (0, num_cols), FULL)
        yield Tile((excess, num_rows), (0, num_cols), Mask(left - excess, None))
    elif left is not None and right is not None and num_rows + right >= 2 * num_cols:
        for start, end in ((0, num_cols), (num_cols, num_rows)):
            for part in _band_tiles(end - start, num_cols, left - start, right + start):
                yield Tile(moved(part.rows, start), part.cols, part.mask)
    else:
        yield Tile((0, num_rows), (0, num_cols), Mask(left, right))


def _square_causal(num_rows: int, num_cols: int, right: int) -> Iterator[Tile]:
    """Cut a trapezoid, which has only a right bound, into full rectangles and a causal square."""
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
        while candidate is not None:
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
        if last.rows == tile.rows and last.cols[1] == tile.cols[0]:
            joined.pop()
            return replace(tile, cols=(last.cols[0], tile.cols[1]))
        if last.cols == tile.cols and last.rows[1] == tile.rows[0]:
            joined.pop()
            return replace(tile, rows=(last.rows[0], tile.rows[1]))
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


def hull(spans: Iterable[Span]) -> Span:
    """From the first index in any of the spans to the last."""
    some = [span for span in spans if length(span)]
    return (min(first for first, _ in some), max(end for _, end in some)) if some else NOTHING


def moved(span: Span, by: int) -> Span:
    """The span, so many indices further on."""
    return span[0] + by, span[1] + by


def _triangle(longest: int, num_terms: int) -> int:
    """`longest + (longest - 1) + ...`, at most `num_terms` terms, none below 1."""
    terms = max(0, min(longest, num_terms))
    return terms * longest - terms * (terms - 1) // 2
