"""Needs where runs have gaps: by comparing all pairs of runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.dealing import Dealing
from dtensor_ring.planning.needs import Needs, Sights, source_blocks, spans_by, spans_of
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.span import Span


class _Summary(NamedTuple):
    """Arrays by rank."""

    firsts: np.ndarray
    ends: np.ndarray
    reaches: np.ndarray


class PairedNeeds(Needs):
    """Runs with gaps interleave, so there is no order of positions to search in.

    Whatever concerns all ranks takes O(n * n) for n runs, in blocks of arrays; a pair of runs is
    settled by the first and the last document in which it has something to see.
    """

    def __init__(self, queries: Dealing, keys: Dealing, slices: Slices) -> None:
        self.world_size = len(keys.shards)
        self._queries, self._keys = queries, keys
        self._tables = slices.tables

    @property
    def num_bytes(self) -> int:
        return 300 * (self.world_size + sum(map(len, self._tables)))

    def seen_by(self, rank: int) -> dict[int, Span]:
        # One rank against all others: n pairs for each of its runs, not n * n.
        keys = np.flatnonzero(self._keys.owners != rank)
        sights = self._compared(keys, np.flatnonzero(self._queries.owners == rank))
        return spans_by(sights.sources, sights)

    def seen_of(self, source: int) -> dict[int, Span]:
        queries = np.flatnonzero(self._queries.owners != source)
        sights = self._compared(np.flatnonzero(self._keys.owners == source), queries)
        return spans_by(sights.viewers, sights)

    def sights(self) -> Iterator[Sights]:
        queries = np.arange(len(self._queries.owners))
        num_pairs = np.full(len(self._keys.owners), len(queries))
        for keys in source_blocks(self._keys.owners, num_pairs):
            yield self._compared(keys, queries)

    @cached_property
    def hulls(self) -> list[Span]:
        return spans_of(self._summary.firsts, self._summary.ends)

    @cached_property
    def reaches(self) -> list[int]:
        return self._summary.reaches.tolist()

    @cached_property
    def _summary(self) -> _Summary:
        """All of it in one pass, as the pairs are what costs."""
        result = _Summary(*np.zeros((3, self.world_size), dtype=np.int64))
        # Larger than any column, so that an unseen source stays empty.
        result.firsts[:] = np.iinfo(np.int64).max
        for block in self.sights():
            distances = (block.viewers - block.sources) % self.world_size
            np.minimum.at(result.firsts, block.sources, block.firsts)
            np.maximum.at(result.ends, block.sources, block.ends)
            np.maximum.at(result.reaches, block.sources, distances)
        return result

    def _compared(self, keys: np.ndarray, queries: np.ndarray) -> Sights:
        """Columns of these runs of keys that the runs of queries of other ranks see."""
        key, query = np.repeat(keys, len(queries)), np.tile(queries, len(keys))
        # A rank needs nothing of itself.
        is_other = self._keys.owners[key] != self._queries.owners[query]
        key, query = key[is_other], query[is_other]
        # Rows of the batch are reduced together: a packet serves them all.
        found = [self._seen(key, query, table) for table in self._tables]
        return Sights(*map(np.concatenate, zip(*found, strict=True))).reduced(self.world_size)

    def _seen(self, key: np.ndarray, query: np.ndarray, table: np.ndarray) -> Sights:
        """The columns of each pair in one batch row, pairs that see nothing left out."""
        firsts, ends = self._hulls(key, query, table)
        # A seen run ends after column 0, so 0 marks the others.
        seen = np.flatnonzero(ends)
        key, query = key[seen], query[seen]
        owners = self._keys.owners[key], self._queries.owners[query]
        cols = self._keys.cols[key]
        return Sights(*owners, firsts[seen] + cols, ends[seen] + cols)

    def _hulls(
        self, key: np.ndarray, query: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of each pair, the first column of the run that is seen, and one after the last."""
        # Where keys ascend from slice to slice, the first that shows anything has the first column.
        if (table[1:, 2] >= table[:-1, 3]).all():
            firsts, ends = self._first_seen(key, query, table)
            return (
                firsts,
                self._first_seen(key, query, table[::-1])[1] if len(table) > 1 else ends,
            )
        firsts = np.full(len(key), np.iinfo(np.int64).max)
        ends = np.zeros(len(key), dtype=np.int64)
        for row in table:
            first, end = self._columns(key, query, row)
            is_seen = first < end
            firsts[is_seen] = np.minimum(firsts, first)[is_seen]
            ends[is_seen] = np.maximum(ends, end)[is_seen]
        return firsts, ends

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

        As `tile._band_tiles`, of which it takes the hull: bounds of positions become bounds of
        indices, and trim the rectangle from all sides.
        """
        # Each run is cut to the slice first; indices then count from the first token inside.
        row, num_rows = (x[query] for x in _indices(self._queries, cut[:2]))
        col, num_cols = (x[key] for x in _indices(self._keys, cut[2:4]))
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
