"""The columns of keys that ranks need of one another; routes are chosen by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.ranges import Span, length, moved, numbered, topmost, united
from dtensor_ring.planning.run_table import Dealing
from dtensor_ring.planning.slice_tables import stacked
from dtensor_ring.planning.slices import Slices


@dataclass(frozen=True)
class Cols:
    """Columns of a shard: ascending spans, none of which is empty, overlaps or touches the next.

    A packet of columns has them side by side, without what lies between the spans.

    >>> cols = Cols(((0, 4), (10, 12)))
    >>> len(cols), cols.packed((10, 11))
    (6, (4, 5))
    """

    spans: tuple[Span, ...] = ()

    @classmethod
    def union(cls, spans: Iterable[Span]) -> Cols:
        """All columns of the spans.

        >>> Cols.union([(3, 5), (0, 1), (4, 8), (8, 9), (2, 2)])
        Cols(spans=((0, 1), (3, 9)))
        """
        joined: list[Span] = []
        for first, end in sorted(span for span in spans if length(span)):
            if joined and first <= joined[-1][1]:
                first, before = joined.pop()
                end = max(end, before)
            joined.append((first, end))
        return cls(tuple(joined))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each span begins among the packed columns, and the number of columns at last."""
        return tuple(accumulate(map(length, self.spans), initial=0))

    def packed(self, span: Span) -> Span:
        """Where columns that lie within one of the spans are among the packed columns."""
        number = bisect_right(self.spans, span[0], key=itemgetter(0)) - 1
        return moved(span, self.offsets[number] - self.spans[number][0])

    def within(self, whole: Cols) -> Cols:
        """These columns, as they are counted among the packed columns of `whole`, which has them.

        >>> Cols(((10, 12),)).within(Cols(((0, 4), (10, 14))))
        Cols(spans=((4, 6),))
        """
        if whole not in self._within:
            # Kept, as what is made of columns is kept for as long as they live.
            self._within[whole] = Cols.union(map(whole.packed, self.spans))
        return self._within[whole]

    @cached_property
    def _within(self) -> dict[Cols, Cols]:
        return {}

    @cached_property
    def _hash(self) -> int:
        return hash(self.spans)

    def __hash__(self) -> int:
        return self._hash  # messages are looked up by their columns in every call

    def __len__(self) -> int:
        return self.offsets[-1]


def cols_by(ids: np.ndarray, firsts: np.ndarray, ends: np.ndarray) -> dict[int, Cols]:
    """The columns of each id, whose entries follow one another, united."""
    spans = list(zip(firsts.tolist(), ends.tolist(), strict=True))
    begins = np.flatnonzero(np.diff(ids, prepend=-1))
    bounds = pairwise([*begins.tolist(), len(spans)])
    return {
        number: Cols(tuple(spans[begin:end]))
        for number, (begin, end) in zip(ids[begins].tolist(), bounds, strict=True)
    }


ONE_OFF = 8
"""A packet leaves columns behind where they are one in so many of it, or more.

It costs a copy of the others, and a message that takes the sum of their gradients home. So a packet
holds at most a seventh more than is seen further on, and stays whole under a plain causal mask.
"""


class Reach(NamedTuple):
    """Columns that other ranks see, each once: arrays, by source, ascending, none of them empty."""

    sources: np.ndarray
    firsts: np.ndarray
    """First column of the source's shard."""
    ends: np.ndarray
    """One after the last column."""
    distances: np.ndarray
    """From the source to the last rank on the ring that sees them."""


class Leg(NamedTuple):
    """A part of the way around the ring on which a packet holds the same columns."""

    last: int = 0
    """Distance from the source to the last rank that gets these columns."""
    cols: Cols = Cols()
    ending: Cols = Cols()
    """Those that go no further."""


def legs_of(reach: Reach, world_size: int) -> list[tuple[Leg, ...]]:
    """By source: the legs of its packet, each with what is seen from its first rank on.

    A packet begins with all columns that any rank sees. On its way it leaves those behind that
    nobody further on sees, where they are enough, see `ONE_OFF`.
    """
    stops = _stops(reach, world_size)
    # Legs are numbered through. Columns are on all legs of their source up to where they end.
    ids = np.arange(world_size) * world_size
    begins, keys = np.searchsorted(stops, ids), reach.sources * world_size + reach.distances
    last = np.searchsorted(stops, keys)
    whose, number = numbered(1 + last - begins[reach.sources])
    legs = begins[reach.sources[whose]] + number
    spans = reach.firsts, reach.ends
    cols = cols_by(*united(legs, *(x[whose] for x in spans)))
    ending = cols_by(*united(last, *spans))
    all_legs = [Leg(x % world_size, cols[i], ending[i]) for i, x in enumerate(stops.tolist())]
    bounds = pairwise([*begins.tolist(), len(stops)])
    return [tuple(all_legs[begin:end]) for begin, end in bounds]


def _stops(reach: Reach, world_size: int) -> np.ndarray:
    """Where packets leave columns behind: `source * world_size + distance`, ascending."""
    keys, which = np.unique(reach.sources * world_size + reach.distances, return_inverse=True)
    counts, left = np.zeros(len(keys), dtype=np.int64), np.zeros(world_size, dtype=np.int64)
    np.add.at(counts, which, reach.ends - reach.firsts)
    np.add.at(left, keys // world_size, counts)
    stops, sizes, left = [], left.tolist(), left.tolist()
    for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
        source = key // world_size
        left[source] -= count
        if ONE_OFF * (sizes[source] - left[source]) >= sizes[source]:
            stops.append(key)
            sizes[source] = left[source]
    return np.array(stops, dtype=np.int64)


ONE_IN = 5
"""The direct route has to save one in so many of the load: see `ring_unless_sparse`."""

NUM_PROBES = 8
"""Evenly spaced ranks that are looked at before all are."""

ONE_IN_PROBED = 6
"""Those have to save one in so many: less than all must, as they are no more than a sample."""

BLOCK = 2**21
"""Pairs of pieces of shards that are compared at once, about 16 MiB for each array of them."""


class Sights(NamedTuple):
    """Columns that ranks see of sources: arrays, one entry for each sight, none of them empty."""

    sources: np.ndarray
    viewers: np.ndarray
    firsts: np.ndarray
    """First column of the source's shard."""
    ends: np.ndarray
    """One after the last column."""

    def united(self, world_size: int) -> Sights:
        """The same columns in as few entries as there can be, by source, then viewer, ascending."""
        ids, *spans = united(self.sources * world_size + self.viewers, self.firsts, self.ends)
        return Sights(ids // world_size, ids % world_size, *spans)


class _DirectTraffic(NamedTuple):
    """Arrays of columns by rank, and of how many pairs of ranks are at each distance."""

    received: np.ndarray
    sent: np.ndarray
    distances: np.ndarray


class Needs(ABC):
    """The columns of each source's shard that each other rank sees, in any row of the batch.

    A rank needs nothing of itself.
    """

    world_size: int

    @abstractmethod
    def sights(self) -> Iterator[Sights]:
        """All there is, united, in blocks; all entries of a source are in one block."""

    @abstractmethod
    def sights_by(self, rank: int) -> Sights:
        """What `rank` sees, united."""

    @abstractmethod
    def sights_of(self, source: int) -> Sights:
        """What is seen of the shard of `source`, united."""

    @property
    @abstractmethod
    def reach(self) -> Reach:
        """All columns that any other rank sees, with how far around the ring they are seen."""

    @cached_property
    def legs(self) -> list[tuple[Leg, ...]]:
        """By source: the way of its packet around the ring, see `legs_of`."""
        return legs_of(self.reach, self.world_size)

    def leg(self, source: int, distance: int) -> Leg:
        """The leg of a packet at that distance from its source; an empty one if it ends before."""
        return next((leg for leg in self.legs[source] if leg.last >= distance), Leg())

    def seen_by(self, rank: int) -> dict[int, Cols]:
        """The columns that `rank` sees, by source; nothing empty."""
        sources, _, *spans = self.sights_by(rank)
        return cols_by(sources, *spans)

    def seen_of(self, source: int) -> dict[int, Cols]:
        """The columns of the shard of `source` that others see, by rank; nothing empty."""
        _, *spans = self.sights_of(source)
        return cols_by(*spans)

    @property
    def num_bytes(self) -> int:
        """Memory that this takes, in bytes."""
        return 200 * self.world_size

    @cached_property
    def ring_load(self) -> Fraction:
        """Columns of the busiest rank plus the mean if all goes around the ring."""
        # A packet comes to the ranks after the last of the one before it, up to its own last: an
        # interval, counted by its ends, on two laps as it may pass rank 0. What a rank sends is
        # what the next one receives.
        change = np.zeros(2 * self.world_size + 1, dtype=np.int64)
        for source, legs in enumerate(self.legs):
            first = source + 1
            for leg in legs:
                change[first] += len(leg.cols)
                first = source + leg.last + 1
                change[first] -= len(leg.cols)
        received = np.cumsum(change[:-1]).reshape(2, self.world_size).sum(0)
        return _load(received, received)

    @cached_property
    def direct_is_lighter(self) -> bool:
        """Whether the load is less by more than a fifth if all goes directly."""
        # Most often a few ranks tell; all of them take as long as there are pairs of ranks.
        num_probes = min(NUM_PROBES, self.world_size)
        probes = [(2 * i + 1) * self.world_size // (2 * num_probes) for i in range(num_probes)]
        sample = [
            [int((x.ends - x.firsts).sum()) for x in (self.sights_by(rank), self.sights_of(rank))]
            for rank in probes
        ]
        if _load(*np.array(sample).T) >= (1 - Fraction(1, ONE_IN_PROBED)) * self.ring_load:
            return False
        received, sent, _ = self._direct
        return _load(received, sent) < (1 - Fraction(1, ONE_IN)) * self.ring_load

    @cached_property
    def distances(self) -> list[int]:
        """All numbers of ranks that lie between a source and one that sees it; ascending."""
        return np.flatnonzero(self._direct.distances).tolist()

    @cached_property
    def _direct(self) -> _DirectTraffic:
        """Traffic if all goes directly; computed in one pass, as it may take all pairs of ranks."""
        result = _DirectTraffic(*np.zeros((3, self.world_size), dtype=np.int64))
        for block in self.sights():
            np.add.at(result.sent, block.sources, block.ends - block.firsts)
            np.add.at(result.received, block.viewers, block.ends - block.firsts)
            result.distances[(block.viewers - block.sources) % self.world_size] += 1
        return result


def _load(received: np.ndarray, sent: np.ndarray) -> Fraction:
    """By what routes are compared: columns of the busiest rank, plus those of a rank in the mean.

    Args:
        received: columns that come to each rank.
        sent: columns that leave it.
    """
    # Exact, as ranks must decide alike.
    mean = Fraction(int(received.sum() + sent.sum()), len(received) + len(sent))
    return mean + int(max(received.max(), sent.max()))


def source_blocks(owners: np.ndarray, num_pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of keys in blocks of about `BLOCK` pairs; all keys of a source are in one block.

    Args:
        owners: the source of each key.
        num_pairs: how many queries each key is compared with.
    """
    order = np.argsort(owners, kind="stable")
    # A source must not be split: sights are united for each pair of ranks within a block.
    last = np.flatnonzero(np.diff(owners[order], append=-1))
    block = np.cumsum(num_pairs[order])[last] // BLOCK
    # A block ends with the last source before the running count passes a multiple of BLOCK.
    cuts = last[np.flatnonzero(np.diff(block, append=-1))] + 1
    for begin, end in pairwise([0, *cuts.tolist()]):
        yield order[begin:end]


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
