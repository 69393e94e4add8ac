"""What each rank computes at each step of the ring, and what has to travel for it.

Everything here is integer arithmetic on positions. The ring above holds no mask logic and names
no layout: it runs the tiles it is given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from dtensor_ring.layout import Layout, Run
from dtensor_ring.mask import Mask

Span = tuple[int, int]
"""A half-open range of indices."""

Documents = tuple[tuple[int, ...], ...]
"""Boundaries of documents in global positions: one row for the whole batch, or one for each row."""

FULL = Mask.full()
CAUSAL = Mask.causal()


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of local queries and held keys, with a band: what one kernel launch computes.

    `mask` is in indices of the tile: row i sees column j iff `i - left <= j <= i + right`. Every
    row and every column of a tile sees or is seen. A tile whose mask is causal is square, so that
    kernels which align the diagonal top-left and bottom-right agree. `batch` is the batch row,
    `None` for all of them.
    """

    rows: Span
    cols: Span
    mask: Mask
    batch: int | None = None

    @property
    def area(self) -> int:
        """Visible (query, key) pairs per batch row: the unit of work."""
        num_rows, num_cols = _length(self.rows), _length(self.cols)
        ahead = (
            0 if self.mask.right is None else _triangle(num_cols - 1 - self.mask.right, num_rows)
        )
        behind = 0 if self.mask.left is None else _triangle(num_rows - 1 - self.mask.left, num_cols)
        return num_rows * num_cols - ahead - behind


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the shard of a source travels: the columns that other ranks see, and the hops."""

    cols: Span = (0, 0)
    num_hops: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of the ring: `tiles` against the columns `cols` of the source's shard.

    The columns of the tiles count from the first held column.
    """

    source: int
    cols: Span
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does: its steps, the same number on every rank, and every source's reach."""

    rank: int
    world_size: int
    steps: tuple[Step, ...]
    reaches: tuple[Reach, ...]

    @property
    def num_steps(self) -> int:
        """Steps of the ring, one more than the hops of the shard that travels furthest."""
        return len(self.steps)

    def arrives(self, source: int, hop: int) -> bool:
        """Whether the shard of `source` makes hop number `hop` (the first is 1)."""
        return 1 <= hop <= self.reaches[source].num_hops


TileGrid = tuple[tuple[tuple[Tile, ...], ...], ...]
"""Tiles by rank, then by source, in indices of the shards."""


@lru_cache(maxsize=1024)
def plan(
    layout: Layout,
    mask: Mask,
    rank: int,
    world_size: int,
    seq_len: int,
    documents: Documents | None = None,
) -> Plan:
    """Plan of one rank.

    Args:
        layout: how the tokens are dealt.
        mask: the band of lags, in tokens.
        rank: this rank's index on the ring.
        world_size: ranks on the ring.
        seq_len: global length, in tokens.
        documents: boundaries; a query sees keys of its own document only, and tokens behind the
            last boundary see nothing.

    Raises:
        ValueError: if the layout cannot deal the length, or the documents are not boundaries.
    """
    grid = tile_grid(layout, mask, world_size, seq_len, documents)
    reaches = _reaches(grid)
    steps = []
    for step in range(1 + max(reach.num_hops for reach in reaches)):
        source = (rank - step) % world_size
        tiles = grid[rank][source]
        cols = reaches[source].cols
        if step == 0:
            cols = (0, sum(run.length for run in layout.runs(rank, world_size, seq_len)))
        held = tuple(replace(tile, cols=_shift(tile.cols, -cols[0])) for tile in tiles)
        steps.append(Step(source, cols, held))
    return Plan(rank, world_size, tuple(steps), reaches)


@lru_cache(maxsize=64)
def tile_grid(
    layout: Layout, mask: Mask, world_size: int, seq_len: int, documents: Documents | None = None
) -> TileGrid:
    """The tiles of every rank against every source: the whole schedule of a ring."""
    _check(world_size, seq_len, documents)
    runs = [layout.runs(rank, world_size, seq_len) for rank in range(world_size)]
    rows = documents or (None,)
    return tuple(
        tuple(
            tuple(
                tile
                for index, bounds in enumerate(rows)
                for tile in shard_tiles(
                    query, key, mask, bounds, batch=index if len(rows) > 1 else None
                )
            )
            for key in runs
        )
        for query in runs
    )


def shard_tiles(
    query_runs: tuple[Run, ...],
    key_runs: tuple[Run, ...],
    mask: Mask,
    bounds: tuple[int, ...] | None = None,
    batch: int | None = None,
) -> list[Tile]:
    """The tiles that cover what the queries of one shard see of the keys of another."""
    tiles: list[Tile] = []
    row = 0
    for query in query_runs:
        col = 0
        for key in key_runs:
            for query_span, key_span in _same_document(query, key, bounds):
                shape = _length(query_span), _length(key_span)
                band = _index_band(query, key, query_span[0], key_span[0], mask)
                for tile in _band_tiles(*shape, *band):
                    tiles.append(
                        Tile(
                            _shift(tile.rows, row + query_span[0]),
                            _shift(tile.cols, col + key_span[0]),
                            tile.mask,
                            batch,
                        )
                    )
            col += key.length
        row += query.length
    return _coalesce(tiles)


def _same_document(
    query: Run, key: Run, bounds: tuple[int, ...] | None
) -> Iterator[tuple[Span, Span]]:
    """Pairs of index ranges of the two runs, one for each document that both hold tokens of."""
    if bounds is None:
        yield (0, query.length), (0, key.length)
        return
    first = bisect_right(bounds, max(query.start, key.start)) - 1
    last_position = min(query.position(query.length - 1), key.position(key.length - 1))
    last = min(bisect_right(bounds, last_position) - 1, len(bounds) - 2)
    for document in range(first, last + 1):
        begin, end = bounds[document], bounds[document + 1]
        query_span, key_span = query.indices(begin, end), key.indices(begin, end)
        if _length(query_span) and _length(key_span):
            yield query_span, key_span


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
    parts = (
        _square_causal(num_rows, num_cols, right)
        if left is None and right is not None
        else [Tile((0, num_rows), (0, num_cols), Mask(left, right))]
    )
    for part in parts:
        yield Tile(_shift(part.rows, first_row), _shift(part.cols, first_col), part.mask)


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
            rows=(tile.rows[0] - _length(last.cols), tile.rows[1]),
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


def _reaches(grid: TileGrid) -> tuple[Reach, ...]:
    """How far each source's shard has to travel: nothing moves that nobody sees."""
    world_size = len(grid)
    reaches = []
    for source in range(world_size):
        seen = {
            hop: grid[(source + hop) % world_size][source]
            for hop in range(1, world_size)
            if grid[(source + hop) % world_size][source]
        }
        cols = [tile.cols for tiles in seen.values() for tile in tiles]
        if cols:
            hull = min(start for start, _ in cols), max(end for _, end in cols)
            reaches.append(Reach(hull, max(seen)))
        else:
            reaches.append(Reach())
    return tuple(reaches)


def _check(world_size: int, seq_len: int, documents: Documents | None) -> None:
    if world_size < 1 or seq_len < 0:
        raise ValueError(f"cannot plan {seq_len} tokens on {world_size} ranks")
    for bounds in documents or ():
        steps_back = any(end < begin for begin, end in pairwise(bounds))
        if not bounds or bounds[0] != 0 or bounds[-1] > seq_len or steps_back:
            raise ValueError(
                "cu_seqlens must start at 0, never decrease and end at or before the sequence "
                f"length {seq_len}, got {list(bounds)}"
            )


def _length(span: Span) -> int:
    return span[1] - span[0]


def _shift(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by


def _triangle(longest: int, num_terms: int) -> int:
    """`longest + (longest - 1) + ...`, at most `num_terms` terms, none below 1."""
    terms = max(0, min(longest, num_terms))
    return terms * longest - terms * (terms - 1) // 2
