"""What queries see of keys in blocks: whole blocks, which kernels read in place, and the edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.ranges import Span
from dtensor_ring.planning.tile import FULL, Tile


def slots_of(table: np.ndarray, columns: np.ndarray, block: int) -> np.ndarray:
    """Where columns of a sequence are among all tokens of a rank's blocks, int64.

    >>> slots_of(np.array([7, 2]), np.array([1, 5]), block=4)
    array([29,  9])

    Args:
        table: the blocks of the sequence on the rank.
        columns: counted over these blocks.
        block: tokens of a block.
    """
    return table.astype(np.int64)[columns // block] * block + columns % block


class Read(NamedTuple):
    """Queries that see all of some keys, which begin with a block.

    Attributes:
        batch: the batch row.
        rows: the queries.
        first: the block that the keys begin with, counted among those of the row's sequence.
        num_keys: keys; the last block need not be full.
    """

    batch: int
    rows: Span
    first: int
    num_keys: int


@dataclass(frozen=True)
class BlockReads:
    """The tiles of a batch of sequences, by how their keys are read.

    Attributes:
        reads: what kernels read in place: nearly all of the keys.
        cols: by batch row, the columns of the edges, which are copied together.
        edges: tiles of those; their columns count among the copied ones.
    """

    reads: tuple[Read, ...]
    cols: tuple[Cols, ...]
    edges: tuple[Tile, ...]


def block_reads(tiles: Iterable[Tile], block: int, batch: int) -> BlockReads:
    """Cut tiles for kernels that begin with a block, and know no mask but a full one.

    Args:
        tiles: their columns are those of each batch row's own sequence.
        block: tokens of a block.
        batch: batch rows.

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
    """The tiles, those of all batch rows once for each."""
    for tile in tiles:
        rows = range(batch) if tile.batch is None else [tile.batch]
        yield from (replace(tile, batch=row) for row in rows)
