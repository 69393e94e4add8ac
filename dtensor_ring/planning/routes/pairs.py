"""Needs where runs have gaps: by comparing all pairs of runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from dtensor_ring.planning.layouts.dealing import Dealing
from dtensor_ring.planning.masks.slices import Slices
from dtensor_ring.planning.masks.tables import stacked
from dtensor_ring.planning.routes.needs import Needs, Sights, source_blocks
from dtensor_ring.planning.routes.reach import Reach
from dtensor_ring.planning.values.ranges import topmost

MAX_PAIRS = 2**19
"""Pairs of runs, times slices, up to which each is looked at, in a quarter of a second or so.

Above it, all columns from the first to the last that a run shows another one in a row of the batch
count as seen: nearly all of it is, where runs have gaps. A striped layout of 64 ranks gets there
with 128 documents, one of 1,024 ranks with one.
"""


class PairedNeeds(Needs):
    """Runs with gaps interleave, so there is no order of positions to search in.

    Whatever concerns all ranks takes O(n * n) for n runs and for each slice, in blocks of arrays.
    Above `MAX_PAIRS`, a pair of runs is settled by the first and the last slice in which it has
    something to see.
    """

    def __init__(self, queries: Dealing, keys: Dealing, slices: Slices) -> None:
        self.world_size = len(keys.shards)
        self._queries, self._keys = queries, keys
        # An empty batch has no table, and sees what an empty table shows.
        self._tables = slices.tables or (stacked([]),)
        # One answer for all ranks, as both sides of a message must agree.
        num_pairs = len(queries.owners) * len(keys.owners)
        self._is_exact = num_pairs * sum(map(len, slices.tables)) <= MAX_PAIRS

    @property
    def num_bytes(self) -> int:
        return 300 * (self.world_size + sum(map(len, self._tables)))

    def sights(self) -> Iterator[Sights]:
        queries = np.arange(len(self._queries.owners))
        num_slices = sum(map(len, self._tables)) if self._is_exact else 1
        num_pairs = np.full(len(self._keys.owners), len(queries) * num_slices)
        for keys in source_blocks(self._keys.owners, num_pairs):
            yield self._compared(keys, queries)

    def sights_by(self, rank: int) -> Sights:
        # One rank against all others: n pairs for each of its runs, not n * n.
        keys = np.flatnonzero(self._keys.owners != rank)
        return self._compared(keys, np.flatnonzero(self._queries.owners == rank))

    def sights_of(self, source: int) -> Sights:
        queries = np.flatnonzero(self._queries.owners != source)
        return self._compared(np.flatnonzero(self._keys.owners == source), queries)

    @cached_property
    def reach(self) -> Reach:
        blocks = [np.zeros((4, 0), dtype=np.int64)]
        for sources, viewers, firsts, ends in self.sights():  # all of a source is in one block
            distances = (viewers - sources) % self.world_size
            blocks.append(np.stack(topmost(sources, firsts, ends, distances)))
        return Reach(*np.concatenate(blocks, axis=1))

    def _compared(self, keys: np.ndarray, queries: np.ndarray) -> Sights:
        """Columns of these runs of keys that the runs of queries of other ranks see."""
        key, query = np.repeat(keys, len(queries)), np.tile(queries, len(keys))
        # A rank needs nothing of itself.
        is_other = self._keys.owners[key] != self._queries.owners[query]
        key, query = key[is_other], query[is_other]
        # Rows of the batch are united: a packet serves them all.
        seen_in = self._seen if self._is_exact else self._hulls
        found = [seen_in(key, query, table) for table in self._tables]
        pairs, firsts, ends = map(np.concatenate, zip(*found, strict=True))
        key, query = key[pairs], query[pairs]
        cols = self._keys.cols[key]
        owners = self._keys.owners[key], self._queries.owners[query]
        return Sights(*owners, firsts + cols, ends + cols).united(self.world_size)

    def _seen(
        self, key: np.ndarray, query: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers of pairs, and the columns that are seen in each slice, where there are any."""
        firsts, ends = self._columns(key, query, table.T[:, :, None])
        slices, pairs = np.nonzero(firsts < ends)
        return pairs, firsts[slices, pairs], ends[slices, pairs]

    def _hulls(
        self, key: np.ndarray, query: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers of pairs, and the columns from the first that is seen to the last."""
        # Where keys ascend from slice to slice, the first that shows anything has the first column.
        if (table[1:, 2] >= table[:-1, 3]).all():
            firsts, ends = self._first_seen(key, query, table)
            if len(table) > 1:
                ends = self._first_seen(key, query, table[::-1])[1]
        else:
            firsts, ends = np.full(len(key), np.iinfo(np.int64).max), np.zeros_like(key)
            for row in table:
                first, end = self._columns(key, query, row)
                is_seen = first < end
                firsts[is_seen] = np.minimum(firsts, first)[is_seen]
                ends[is_seen] = np.maximum(ends, end)[is_seen]
        pairs = np.flatnonzero(firsts < ends)
        return pairs, firsts[pairs], ends[pairs]

    def _first_seen(
        self, key: np.ndarray, query: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of each pair, the columns of the run in the first slice that has any; (0, 0) if none."""
        firsts, ends = np.zeros((2, len(key)), dtype=np.int64)
        todo = np.arange(len(key))
        # Most pairs are settled by the first document: only the others go on to the next.
        for row in table:
            if not todo.size:
                break
            first, end = self._columns(key[todo], query[todo], row)
            is_seen = first < end
            firsts[todo[is_seen]], ends[todo[is_seen]] = first[is_seen], end[is_seen]
            todo = todo[~is_seen]
        return firsts, ends

    def _columns(
        self, key: np.ndarray, query: np.ndarray, cut: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of each pair, the columns of the run of keys that are seen in a slice; empty if none.

        They are neighbours. As `tile._band_tiles`, of which it takes the hull: bounds of positions
        become bounds of indices, and trim the rectangle from all sides.

        Args:
            key: run of keys of each pair.
            query: run of queries.
            cut: the slice, a row of a table; or the columns of a table, `(6, slices, 1)`, for
                results of shape `(slices, pairs)`.
        """
        # Each run is cut to the slice first; indices then count from the first token inside.
        row, num_rows = (x[..., query] for x in _indices(self._queries, cut[:2]))
        col, num_cols = (x[..., key] for x in _indices(self._keys, cut[2:4]))
        queries, keys, stride = self._queries, self._keys, self._queries.stride
        # Without bounds there is no diagonal, and the strides of both sides may differ.
        offset = queries.starts[query] + row * stride - keys.starts[key] - col * keys.stride
        left, right = (cut[4] - offset) // stride, (cut[5] + offset) // stride
        # Rows that see any column, then columns that any of those rows sees.
        first_row, end_row = np.maximum(0, -right), np.minimum(num_rows, num_cols + left)
        first, end = np.maximum(0, first_row - left), np.minimum(num_cols, end_row + right)
        is_seen = (num_rows > 0) & (num_cols > 0) & (left + right >= 0) & (first_row < end_row)
        return first + col, np.where(is_seen, end, 0) + col


def _indices(dealing: Dealing, span: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First token of each run in a span of positions, and the number of its tokens there."""
    # Rounded up, as -(-a // b): the first token at or after each end of the span.
    first = np.maximum(0, -((dealing.starts - span[0]) // dealing.stride))
    end = np.minimum(dealing.lengths, -((dealing.starts - span[1]) // dealing.stride))
    return first, end - first
