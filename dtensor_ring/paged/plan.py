"""Split the visible keys of a query into whole blocks, which kernels read in place, and edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.ranges import Span
from dtensor_ring.planning.tile import FULL, Tile


def slots_of(table: np.ndarray, columns: np.ndarray, block: int) -> np.ndarray:
    """Return the slots of a sequence's columns among all tokens of a rank's blocks, int64.

    >>> slots_of(np.array([7, 2]), np.array([1, 5]), block=4)
    array([29,  9])

    Args:
        table: the blocks of the sequence on the rank.
        columns: the columns, counted over these blocks.
        block: tokens of a block.
    """
    return table.astype(np.int64)[columns // block] * block + columns % block


class Read(NamedTuple):
    """Queries that see all keys of a range that begins with a block.

    Attributes:
        batch: the batch row.
        rows: the span of queries.
        first: the first block of the range, counted among the blocks of the row's sequence.
        num_keys: the number of keys; the last block need not be full.
    """

    batch: int
    rows: Span
    first: int
    num_keys: int


@dataclass(frozen=True)
class BlockReads:
    """The tiles of a batch of sequences, split by how their keys are read.

    Attributes:
        reads: the ranges that kernels read in place: nearly all keys.
        cols: by batch row, the columns of the edges, which are copied together.
        edges: the tiles of the edges; their columns are indices into the copies.
    """

    reads: tuple[Read, ...]
    cols: tuple[Cols, ...]
    edges: tuple[Tile, ...]


def block_reads(tiles: Iterable[Tile], block: int, batch: int) -> BlockReads:
    """Split tiles for kernels that start at a block and support only the full mask.

    Args:
        tiles: the tiles; their columns are those of each batch row's own sequence.
        block: tokens of a block.
        batch: the number of batch rows.

    >>> block_reads([Tile((0, 1), (3, 10), FULL)], block=4, batch=1)
    ... # doctest: +NORMALIZE_WHITESPACE
    BlockReads(reads=(Read(batch=0, rows=(0, 1), first=1, num_keys=6),),
        cols=(Cols(spans=((3, 4),)),),
        edges=(Tile(rows=(0, 1), cols=(0, 1),
            mask=Mask(left=None, right=None, chunk=None, prefix=None), batch=0),))
    """
    reads: list[Read] = []
    edges: list[Tile] = []
    for tile in _by_row(tiles, batch):
        begin = -(-tile.cols[0] // block) * block
        if tile.mask != FULL or begin >= tile.cols[1]:
            edges.append(tile)
            continue
        assert tile.batch is not None
        reads.append(Read(tile.batch, tile.rows, begin // block, tile.cols[1] - begin))
        if tile.cols[0] < begin:
            edges.append(replace(tile, cols=(tile.cols[0], begin)))
    cols = tuple(
        Cols.union(tile.cols for tile in edges if tile.batch == row) for row in range(batch)
    )
    packed = (replace(tile, cols=cols[tile.batch or 0].packed(tile.cols)) for tile in edges)
    return BlockReads(tuple(reads), cols, tuple(packed))


def _by_row(tiles: Iterable[Tile], batch: int) -> Iterator[Tile]:
    """Yield the tiles; a tile of all batch rows is repeated for each row."""
    for tile in tiles:
        rows = range(batch) if tile.batch is None else [tile.batch]
        yield from (replace(tile, batch=row) for row in rows)
