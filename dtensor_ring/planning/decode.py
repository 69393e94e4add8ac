"""Plans decoding: a few queries, the same on every rank, attend to the keys of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Layout, Run
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.plan import Step, checked_slices
from dtensor_ring.planning.ranges import length, moved
from dtensor_ring.planning.run_table import RunTable, deal
from dtensor_ring.planning.slice_tables import LARGEST
from dtensor_ring.planning.slices import Rows, Slices, rows_of
from dtensor_ring.planning.tile import FULL, Piece, Tile, coalesce, pieces_of, shard_tiles


@cached_bytes(2**24, lambda step: 2000 + 330 * len(step.tiles))
def decode_step(
    layout: Layout,
    mask: Mask,
    rank: int,
    world_size: int,
    seq_len: int,
    starts: tuple[int, ...],
    num_queries: int,
    documents: Documents | None = None,
    slices: Slices | None = None,
) -> Step:
    """Return the only step of a rank, from a cache of 16 MiB.

    Its tiles pair all queries with the rank's own columns. The time grows with the number of runs
    of this rank, and of runs at an edge of what a query sees. Keys that all see are one tile.

    Args:
        layout: how the keys are sharded, or a `RunTable`.
        mask: what a query sees.
        rank: this rank's index on the axis.
        world_size: ranks on the axis.
        seq_len: number of positions of keys; queries may come after them.
        starts: position of the first query, for the whole batch or for each batch row.
        num_queries: number of queries, at consecutive positions.
        documents: boundaries, see `plan`; they may reach beyond `seq_len`.
        slices: what a query sees, instead of mask and documents; they may reach beyond `seq_len`.

    Raises:
        ValueError: if runs, documents or slices do not fit.
    """
    # A power of two, so a growing sequence reuses one table: positions without keys add no tiles.
    longest = max(seq_len, max(starts, default=0) + num_queries)
    horizon = 1 << max(10, (longest - 1).bit_length())
    if documents is not None or slices is not None:
        horizon = LARGEST  # they may describe the sequence at its final length
    seen = checked_slices(mask, world_size, (horizon, horizon), documents, None, slices)
    columns = _columns(layout, rank, world_size, seq_len)
    tiles: list[Tile] = []
    for batch, start, table in _batch_rows(rows_of(seen), starts):
        pieces = pieces_of(_queries(start, num_queries, columns.stride), table)
        found = [tile for piece in pieces for tile in columns.tiles(piece, batch)]
        tiles += coalesce(sorted(found, key=lambda tile: (tile.rows, tile.cols)))
    return Step(0, rank, Cols.union([(0, columns.num_tokens)]), tuple(tiles))


def _batch_rows(
    rows: Rows, starts: tuple[int, ...]
) -> Iterator[tuple[int | None, int, np.ndarray]]:
    """Yield the batch row (`None` for all rows), its first query position, and its slices."""
    if len(set(starts)) == 1:
        yield from ((batch, starts[0], table) for batch, table in rows)
        return
    for batch, start in enumerate(starts):
        yield batch, start, rows[batch if len(rows) > 1 else 0][1]


def _queries(start: int, num_queries: int, stride: int) -> list[Run]:
    """Return the queries as runs; against keys with gaps, each query is a run of its own."""
    if stride == 1:
        return [Run(start, num_queries)]
    return [Run(start + index, 1) for index in range(num_queries)]


class _Columns:
    """The columns of a rank, in which its runs lie side by side.

    Args:
        starts: first position of each run, ascending.
        lengths: number of tokens of each run, at least 1.
        stride: the stride of all runs.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, stride: int) -> None:
        self._starts, self._lengths, self.stride = starts, lengths, stride
        self._lasts = starts + (lengths - 1) * stride
        self._offsets = np.append(0, np.cumsum(lengths))
        self.num_tokens = int(self._offsets[-1])

    def tiles(self, piece: Piece, batch: int | None) -> Iterator[Tile]:
        """Yield the tiles that the queries of a piece see, in no defined order."""
        first, last = piece.run.position(piece.span[0]), piece.run.position(piece.span[1] - 1)
        begin, end = piece.keys
        # All queries see the keys from `inner` to `outer`; only some see the other keys.
        inner = begin if piece.left is None else max(begin, last - piece.left)
        outer = end if piece.right is None else min(end, first + piece.right + 1)
        if inner >= outer:
            inner = outer = begin
        cols = self._below(inner), self._below(outer)
        if length(cols):
            yield Tile(moved(piece.span, piece.row), cols, FULL, batch)
        for span in ((begin, inner), (outer, end)):
            if length(span):
                yield from self._edge(piece._replace(keys=span), batch)

    def _below(self, position: int) -> int:
        """Return the number of columns before a position."""
        index = int(np.searchsorted(self._lasts, position))
        if index == len(self._lasts):
            return self.num_tokens
        return int(self._offsets[index]) + self._run(index).indices(position, position)[0]

    def _edge(self, piece: Piece, batch: int | None) -> Iterator[Tile]:
        """Yield the tiles of the runs that hold keys of a piece."""
        first, end = np.searchsorted(self._lasts, piece.keys).tolist()
        runs = tuple(map(self._run, range(first, min(end + 1, len(self._lasts)))))
        for tile in shard_tiles([piece], runs, batch):
            cols = moved(tile.cols, int(self._offsets[first]))
            yield Tile(tile.rows, cols, tile.mask, batch)

    def _run(self, index: int) -> Run:
        return Run(int(self._starts[index]), int(self._lengths[index]), self.stride)


def _columns(layout: Layout, rank: int, world_size: int, seq_len: int) -> _Columns:
    if isinstance(layout, RunTable):  # a cache may have dropped positions
        return _Columns(*layout.numbers_of(rank, world_size), stride=1)
    dealing = deal(layout, world_size, seq_len)
    is_here = dealing.owners == rank
    return _Columns(dealing.starts[is_here], dealing.lengths[is_here], dealing.stride)
