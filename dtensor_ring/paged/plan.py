"""Split the visible keys of a query into whole blocks, which kernels read in place, and edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Serpentine
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import Span, length
from dtensor_ring.planning.tile import FULL, Tile


def slots_of(table: np.ndarray, columns: np.ndarray, block: int) -> np.ndarray:
    """Return the slots of sequences' columns among all tokens of a rank's blocks, int64.

    >>> slots_of(np.array([7, 2]), np.array([1, 5]), block=4)
    array([29,  9])

    Args:
        table: the blocks of each sequence on the rank, `(..., P)`.
        columns: the columns of each `(..., C)`, counted over its blocks.
        block: tokens of a block.
    """
    blocks = np.take_along_axis(table, columns // block, -1).astype(np.int64)
    return blocks * block + columns % block


@dataclass(frozen=True, eq=False)
class Reads:
    """Queries of different batch rows that each see all keys of a range that begins with a block.

    Attributes:
        queries: the span of queries, the same in all these rows.
        rows: the batch rows, `(E,)`.
        firsts: the first block of each range, counted among the blocks of the row's sequence.
        num_keys: the number of keys of each; the last block need not be full.
    """

    queries: Span
    rows: np.ndarray
    firsts: np.ndarray
    num_keys: np.ndarray


@dataclass(frozen=True, eq=False)
class EdgeReads:
    """Keys that are copied together, of batch rows that have some.

    Attributes:
        rows: the batch rows, `(E,)`.
        cols: the columns of each row `(E, C)`, padded with a column of the row.
        visible: which of these each query sees, `(E, M, C)`, bool.
    """

    rows: np.ndarray
    cols: np.ndarray
    visible: np.ndarray


@dataclass(frozen=True)
class BlockReads:
    """What the queries of a batch of sequences see, split by how the keys are read.

    Attributes:
        whole: the ranges that kernels read in place: nearly all keys.
        edges: the remaining keys, `None` if all are in `whole`.
    """

    whole: tuple[Reads, ...]
    edges: EdgeReads | None


def last_token_reads(
    lengths: np.ndarray, mask: Mask, dealing: Serpentine, rank: int, whole_blocks: bool
) -> BlockReads:
    """Return the keys of a rank that the last tokens of each sequence see.

    Each sees what it sees as the last token of all: the tokens up to itself but what is before its
    window or its chunk. So no tiles are made. The time hardly depends on the number of sequences.

    >>> lengths = np.array([[6], [9]])
    >>> found = last_token_reads(lengths, Mask.sliding(4), Serpentine(4, 1), 0, True)
    >>> found.whole[0].rows, found.whole[0].firsts, found.edges.cols.tolist()
    (array([1]), array([1]), [[1, 2, 3, 4, 5], [8, 8, 8, 8, 8]])

    Args:
        lengths: the number of tokens of each sequence up to each query, `(B, M)`, ascending.
        mask: which keys a query sees.
        dealing: the rule that shards blocks over ranks.
        rank: the rank.
        whole_blocks: whether the ranges also end with a block.
    """
    block, last = dealing.block, lengths - 1
    begin = np.zeros_like(lengths) if mask.chunk is None else last // mask.chunk * mask.chunk
    if mask.left is not None:
        begin = np.maximum(begin, last - mask.left)
    # Blocks of 4, a window of 8 before each token, two last queries, at 9 and 10:
    #     columns   0 1 2 3  4 5 6 7  8 9 10
    #     query 9     # # #  # # # #  # #
    #     query 10      # #  # # # #  # # #
    #     read        edges  whole    edges
    first, end = (dealing.nums_before(x, rank) for x in (begin, lengths))
    # All queries of a row see the columns from `inner` to `outer`.
    # The last query begins latest, and the first one ends first: between them all is seen.
    inner = -(-first[:, -1] // block) * block
    outer = end[:, 0] // block * block if whole_blocks else end[:, 0]
    is_whole = inner < outer
    inner, outer = (np.where(is_whole, x, end[:, -1]) for x in (inner, outer))
    (rows,) = is_whole.nonzero()
    reads = Reads((0, lengths.shape[1]), rows, inner[rows] // block, (outer - inner)[rows])
    edges = _two_ranges((first[:, 0], inner), (outer, end[:, -1]), (first, end))
    return BlockReads((reads,) if len(rows) else (), edges)


def _two_ranges(
    before: tuple[np.ndarray, np.ndarray],
    after: tuple[np.ndarray, np.ndarray],
    seen: tuple[np.ndarray, np.ndarray],
) -> EdgeReads | None:
    """Return the edges whose columns are two ranges of each row; queries see a range of all."""
    num_before = before[1] - before[0]
    num_cols = num_before + after[1] - after[0]
    (rows,) = num_cols.nonzero()
    if not len(rows):
        return None
    numbers = np.arange(num_cols.max())
    is_column = numbers < num_cols[rows, None]
    # Columns past the end of a row read its last one again, and `is_column` hides them.
    numbers = np.minimum(numbers, num_cols[rows, None] - 1)
    # Numbers count through both ranges: those of the second one skip what is between them.
    later = (after[0] - num_before - before[0])[rows, None] * (numbers >= num_before[rows, None])
    cols = before[0][rows, None] + numbers + later
    first, end = (x[rows, :, None] for x in seen)
    is_seen = (first <= cols[:, None]) & (cols[:, None] < end)
    return EdgeReads(rows, cols, is_column[:, None] & is_seen)


def block_reads(
    tiles: Iterable[Tile],
    block: int,
    shape: tuple[int, int],
    whole_blocks: bool = False,
) -> BlockReads:
    """Split tiles for kernels that start at a block and support only the full mask.

    Args:
        tiles: the tiles; their columns are those of each batch row's own sequence.
        block: tokens of a block.
        shape: the number of batch rows, and of queries of each.
        whole_blocks: whether the ranges also end with a block.

    >>> found = block_reads([Tile((0, 1), (3, 10), FULL)], block=4, shape=(1, 1))
    >>> found.whole[0].firsts, found.whole[0].num_keys, found.edges.cols
    (array([1]), array([6]), array([[3]]))
    """
    by_rows: dict[tuple[Span, int], list[tuple[int, int, int]]] = defaultdict(list)
    seen: dict[tuple[int, Span], int] = defaultdict(int)
    edges: list[Tile] = []
    for tile in _by_row(tiles, shape[0]):
        first, last = tile.cols
        begin, end = -(-first // block) * block, last // block * block if whole_blocks else last
        if tile.mask != FULL or begin >= end:
            edges.append(tile)
            continue
        row = tile.batch or 0
        # A row that reads several ranges has each of them in another launch.
        by_rows[tile.rows, seen[row, tile.rows]].append((row, begin // block, end - begin))
        seen[row, tile.rows] += 1
        edges += [replace(tile, cols=x) for x in ((first, begin), (end, last)) if length(x)]
    whole = []
    for (queries, _), ranges in by_rows.items():
        rows, firsts, num_keys = np.array(ranges).T
        whole.append(Reads(queries, rows, firsts, num_keys))
    return BlockReads(tuple(whole), _edges(edges, shape[1]) if edges else None)


def _edges(tiles: list[Tile], num_queries: int) -> EdgeReads:
    rows = sorted({tile.batch or 0 for tile in tiles})
    cols = [Cols.union(x.cols for x in tiles if x.batch == row) for row in rows]
    shape = len(rows), max(map(len, cols))
    listed = np.empty(shape, dtype=np.int64)
    for row, mine in zip(listed, cols, strict=True):
        numbers = np.concatenate([np.arange(first, end) for first, end in mine.spans])
        # Rows are padded with their last column, which `visible` hides.
        row[: len(mine)], row[len(mine) :] = numbers, numbers[-1]
    visible = np.zeros((shape[0], num_queries, shape[1]), dtype=bool)
    for tile in tiles:
        number = rows.index(tile.batch or 0)
        (first_row, end_row), (first, end) = tile.rows, cols[number].packed(tile.cols)
        part = visible[number, first_row:end_row, first:end]
        part |= sees(tile.mask, end_row - first_row, end - first)
    return EdgeReads(np.array(rows), listed, visible)


def sees(mask: Mask, num_rows: int, num_cols: int) -> np.ndarray:
    """Return which columns each row of a tile sees, `(R, C)`, bool.

    >>> sees(Mask(1, 0), 2, 3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    lags = np.arange(num_rows)[:, None] - np.arange(num_cols)
    found = np.ones(lags.shape, dtype=bool)
    if mask.left is not None:
        found &= lags <= mask.left
    if mask.right is not None:
        found &= -lags <= mask.right
    return found


def _by_row(tiles: Iterable[Tile], batch: int) -> Iterator[Tile]:
    """Yield the tiles; a tile of all batch rows is repeated for each row."""
    for tile in tiles:
        rows = range(batch) if tile.batch is None else [tile.batch]
        yield from (replace(tile, batch=row) for row in rows)
