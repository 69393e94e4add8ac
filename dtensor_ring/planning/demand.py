"""Computes which columns of keys each rank needs from each other rank, to choose routes."""

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

from dtensor_ring.planning.ranges import Span, differing, length, moved, numbered, topmost, united
from dtensor_ring.planning.run_table import ShardTable
from dtensor_ring.planning.slice_tables import stacked
from dtensor_ring.planning.slices import Slices


@dataclass(frozen=True)
class Cols:
    """Columns of a shard: ascending spans, none of which is empty, overlaps or touches the next.

    A packet holds the columns side by side, without the gaps between the spans.

    >>> cols = Cols(((0, 4), (10, 12)))
    >>> len(cols), cols.packed((10, 11))
    (6, (4, 5))
    """

    spans: tuple[Span, ...] = ()

    @classmethod
    def union(cls, spans: Iterable[Span]) -> Cols:
        """Return all columns of the spans.

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
        """First packed column of each span, followed by the total number of columns."""
        return tuple(accumulate(map(length, self.spans), initial=0))

    def packed(self, span: Span) -> Span:
        """Map columns that lie within one of the spans to packed columns."""
        number = bisect_right(self.spans, span[0], key=itemgetter(0)) - 1
        return moved(span, self.offsets[number] - self.spans[number][0])

    def within(self, whole: Cols) -> Cols:
        """Return these columns as packed columns of `whole`, which must contain them.

        >>> Cols(((10, 12),)).within(Cols(((0, 4), (10, 14))))
        Cols(spans=((4, 6),))
        """
        if whole not in self._within:
            # Kept, because indices made from columns are cached only while these live.
            self._within[whole] = Cols.union(map(whole.packed, self.spans))
        return self._within[whole]

    def blocks(self, size: int) -> Cols:
        """Return the numbers of the blocks of `size` columns of the shard that these touch.

        >>> Cols(((0, 4), (10, 12), (13, 14))).blocks(4)
        Cols(spans=((0, 1), (2, 4)))
        """
        if size == 1:
            return self
        if size not in self._blocks:
            self._blocks[size] = Cols.union((a // size, -(-b // size)) for a, b in self.spans)
        return self._blocks[size]

    @cached_property
    def _blocks(self) -> dict[int, Cols]:
        return {}

    @cached_property
    def _within(self) -> dict[Cols, Cols]:
        return {}

    @cached_property
    def _hash(self) -> int:
        return hash(self.spans)

    def __hash__(self) -> int:
        return self._hash  # messages are looked up by their columns in every call

    def __len__(self) -> int:
        # Each token of a decoding sequence makes such columns, and asks once.
        return length(self.spans[0]) if len(self.spans) == 1 else self.offsets[-1]


def cols_by(ids: np.ndarray, firsts: np.ndarray, ends: np.ndarray) -> dict[int, Cols]:
    """Return the columns of each id; entries must be sorted by id and already united."""
    spans = list(zip(firsts.tolist(), ends.tolist(), strict=True))
    # Entries are sorted: an id begins where it differs from the one before.
    begins = np.flatnonzero(differing(ids))
    bounds = pairwise([*begins.tolist(), len(spans)])
    return {
        number: Cols(tuple(spans[begin:end]))
        for number, (begin, end) in zip(ids[begins].tolist(), bounds, strict=True)
    }


# A packet drops columns once at least 1/8 of it is no longer needed. Each drop costs a copy of the
# remaining columns and one message that returns the gradient sums of the dropped ones. So a packet
# is at most 1/7 larger than what later ranks see, and stays whole under a plain causal mask.
ONE_OFF = 8


class LastHop(NamedTuple):
    """Spans of columns that other ranks see: arrays sorted by source, then column; none is empty.

    Attributes:
        sources: rank that holds the span; each of its columns is in one span only.
        firsts, ends: the span, in columns of the source's shard.
        distances: the largest distance from the source to a rank that sees the span.
    """

    sources: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray
    distances: np.ndarray


class PacketStage(NamedTuple):
    """A part of the trip around the ring on which a packet holds the same columns.

    Attributes:
        last: distance from the source to the last rank that gets these columns.
        cols: columns that the packet holds.
        ending: columns that it drops after this stage.
    """

    last: int = 0
    cols: Cols = Cols()
    ending: Cols = Cols()


def stages_of(last_hops: LastHop, world_size: int) -> list[tuple[PacketStage, ...]]:
    """Return the stages of each source's packet; a stage holds what its ranks and later ones see.

    A packet begins with all columns that any rank sees. It drops columns that no later rank sees,
    once they are enough of it, see `ONE_OFF`.
    """
    stops = _stops(last_hops, world_size)
    # Stages are numbered over all sources. A column is on each stage of its source up to its last.
    ids = np.arange(world_size) * world_size
    begins, keys = np.searchsorted(stops, ids), last_hops.sources * world_size + last_hops.distances
    last = np.searchsorted(stops, keys)
    whose, number = numbered(1 + last - begins[last_hops.sources])
    stages = begins[last_hops.sources[whose]] + number
    stages, firsts, ends = united(stages, last_hops.firsts[whose], last_hops.ends[whose])
    cols = cols_by(stages, firsts, ends)
    last, firsts, ends = united(last, last_hops.firsts, last_hops.ends)
    ending = cols_by(last, firsts, ends)
    all_stages = [
        PacketStage(x % world_size, cols[i], ending[i]) for i, x in enumerate(stops.tolist())
    ]
    bounds = pairwise([*begins.tolist(), len(stops)])
    return [tuple(all_stages[begin:end]) for begin, end in bounds]


def _stops(last_hops: LastHop, world_size: int) -> np.ndarray:
    """Return where packets drop columns: `source * world_size + distance`, ascending."""
    keys, which = np.unique(
        last_hops.sources * world_size + last_hops.distances, return_inverse=True
    )
    counts, left = np.zeros(len(keys), dtype=np.int64), np.zeros(world_size, dtype=np.int64)
    np.add.at(counts, which, last_hops.ends - last_hops.firsts)
    np.add.at(left, keys // world_size, counts)
    stops, sizes, left = [], left.tolist(), left.tolist()
    for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
        source = key // world_size
        left[source] -= count
        if ONE_OFF * (sizes[source] - left[source]) >= sizes[source]:
            stops.append(key)
            sizes[source] = left[source]
    return np.array(stops, dtype=np.int64)


# The direct route must save more than 1/5 of the load around the ring, see `ring_unless_sparse`.
ONE_IN = 5
# Evenly spaced ranks that are sampled first: all pairs of ranks take long.
NUM_PROBES = 8
# Savings threshold for the sampled ranks; looser than `ONE_IN` because it is an estimate.
ONE_IN_PROBED = 6

# Pairs of parts of shards that are compared at once: an array of them takes about 16 MiB.
BLOCK = 2**21


class Visibility(NamedTuple):
    """Columns of sources that other ranks see: arrays with one entry for each span, none empty.

    Attributes:
        sources, viewers: rank that holds the span, and rank that sees it.
        firsts, ends: the span, in columns of the source's shard.
    """

    sources: np.ndarray
    viewers: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray

    def united(self, world_size: int) -> Visibility:
        """Merge the spans of each pair of ranks; sort them by source, viewer and column."""
        ids, firsts, ends = united(self.sources * world_size + self.viewers, self.firsts, self.ends)
        return Visibility(ids // world_size, ids % world_size, firsts, ends)


class _DirectTraffic(NamedTuple):
    """Columns of the direct route by rank, and visible spans by distance: `(W,)` each."""

    received: np.ndarray
    sent: np.ndarray
    distances: np.ndarray


class KeyDemand(ABC):
    """The columns of each source's shard that each other rank sees, in any row of the batch.

    A rank needs nothing from itself.
    """

    world_size: int

    @abstractmethod
    def visibility(self) -> Iterator[Visibility]:
        """Yield all visible spans in blocks, united; all entries of a source are in one block."""

    @abstractmethod
    def visible_to(self, rank: int) -> Visibility:
        """Return the columns of other ranks that `rank` sees, united."""

    @abstractmethod
    def visibility_of(self, source: int) -> Visibility:
        """Return the columns of the shard of `source` that other ranks see, united."""

    @property
    @abstractmethod
    def last_hops(self) -> LastHop:
        """All columns that any other rank sees, each with the distance of the last such rank."""

    @cached_property
    def stages(self) -> list[tuple[PacketStage, ...]]:
        """The stages of each source's packet around the ring, see `stages_of`."""
        return stages_of(self.last_hops, self.world_size)

    def stage(self, source: int, distance: int) -> PacketStage:
        """Return the stage of a packet at a distance from its source; empty if it ends before."""
        return next(
            (stage for stage in self.stages[source] if stage.last >= distance), PacketStage()
        )

    def seen_by(self, rank: int) -> dict[int, Cols]:
        """Return the columns that `rank` sees, keyed by source; none is empty."""
        found = self.visible_to(rank)
        return cols_by(found.sources, found.firsts, found.ends)

    def seen_of(self, source: int) -> dict[int, Cols]:
        """Return the columns of `source` that others see, keyed by rank; none is empty."""
        found = self.visibility_of(source)
        return cols_by(found.viewers, found.firsts, found.ends)

    @property
    def num_bytes(self) -> int:
        """Estimated memory of this object, in bytes."""
        return 200 * self.world_size

    @cached_property
    def around_load(self) -> Fraction:
        """Load of the route around the ring: columns of the busiest rank plus the mean of ranks."""
        # A stage reaches an interval of ranks, from after the previous stage's last to its own
        # last. We count intervals by their ends, on two laps, as they may pass rank 0. Each rank
        # sends what the next one receives.
        change = np.zeros(2 * self.world_size + 1, dtype=np.int64)
        for source, stages in enumerate(self.stages):
            first = source + 1
            for stage in stages:
                change[first] += len(stage.cols)
                first = source + stage.last + 1
                change[first] -= len(stage.cols)
        received = np.cumsum(change[:-1]).reshape(2, self.world_size).sum(0)
        return _load(received, received)

    @cached_property
    def direct_is_lighter(self) -> bool:
        """Whether the direct route saves more than a fifth (`ONE_IN`) of the load around."""
        # A few sampled ranks mostly suffice; the exact load takes time for all pairs of ranks.
        num_probes = min(NUM_PROBES, self.world_size)
        probes = [(2 * i + 1) * self.world_size // (2 * num_probes) for i in range(num_probes)]
        received = np.array([(x.ends - x.firsts).sum() for x in map(self.visible_to, probes)])
        sent = np.array([(x.ends - x.firsts).sum() for x in map(self.visibility_of, probes)])
        if _load(received, sent) >= (1 - Fraction(1, ONE_IN_PROBED)) * self.around_load:
            return False
        received, sent, _ = self._direct
        return _load(received, sent) < (1 - Fraction(1, ONE_IN)) * self.around_load

    @cached_property
    def distances(self) -> list[int]:
        """All distances from a source to a rank that sees it, ascending."""
        return np.flatnonzero(self._direct.distances).tolist()

    @cached_property
    def _direct(self) -> _DirectTraffic:
        """Traffic of the direct route, computed in one pass: it may take all pairs of ranks."""
        result = _DirectTraffic._make(np.zeros((3, self.world_size), dtype=np.int64))
        for block in self.visibility():
            np.add.at(result.sent, block.sources, block.ends - block.firsts)
            np.add.at(result.received, block.viewers, block.ends - block.firsts)
            result.distances[(block.viewers - block.sources) % self.world_size] += 1
        return result


def _load(received: np.ndarray, sent: np.ndarray) -> Fraction:
    """Return the load by which routes are compared: maximum plus mean columns per rank.

    Args:
        received: columns that come to each rank.
        sent: columns that leave each rank.
    """
    # Exact, because all ranks must choose the same route.
    mean = Fraction(int(received.sum() + sent.sum()), len(received) + len(sent))
    return mean + int(max(received.max(), sent.max()))


def source_blocks(owners: np.ndarray, num_pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Yield indices of keys in blocks of about `BLOCK` pairs, without splitting a source.

    Args:
        owners: the source of each key.
        num_pairs: number of queries that each key is compared with.
    """
    order = np.argsort(owners, kind="stable")
    # A source must not be split: `Visibility.united` merges the spans of a pair within one block.
    last = np.flatnonzero(np.diff(owners[order], append=-1))
    block = np.cumsum(num_pairs[order])[last] // BLOCK
    # A block ends with the last source before the running count passes a multiple of BLOCK.
    cuts = last[np.flatnonzero(np.diff(block, append=-1))] + 1
    for begin, end in pairwise([0, *cuts.tolist()]):
        yield order[begin:end]


# Pairs of runs, times slices, up to which each one is looked at (in about 0.25 s). Above it, a run
# of queries counts as seeing all columns of a run of keys from the first to the last one it sees
# in a batch row: with gaps in the runs, it sees nearly all of them. A striped layout gets there
# with 128 documents on 64 ranks, or with a single one on 1,024 ranks.
MAX_PAIRS = 2**19


class PairwiseDemand(KeyDemand):
    """Demand of runs with gaps, which interleave: every pair of runs is compared.

    What concerns all ranks takes O(n * n) time for n runs and each slice, in blocks of arrays.
    Above `MAX_PAIRS`, only the first and the last slice that show a pair anything decide.
    """

    def __init__(self, queries: ShardTable, keys: ShardTable, slices: Slices) -> None:
        self.world_size = len(keys.shards)
        self._queries, self._keys = queries, keys
        # An empty batch has no table; an empty table shows nothing, too.
        self._tables = slices.tables or (stacked([]),)
        # One answer for all ranks, as both sides of a message must agree.
        num_pairs = len(queries.owners) * len(keys.owners)
        self._is_exact = num_pairs * sum(map(len, slices.tables)) <= MAX_PAIRS

    @property
    def num_bytes(self) -> int:
        return 300 * (self.world_size + sum(map(len, self._tables)))

    def visibility(self) -> Iterator[Visibility]:
        queries = np.arange(len(self._queries.owners))
        num_slices = sum(map(len, self._tables)) if self._is_exact else 1
        num_pairs = np.full(len(self._keys.owners), len(queries) * num_slices)
        for keys in source_blocks(self._keys.owners, num_pairs):
            yield self._compared(keys, queries)

    def visible_to(self, rank: int) -> Visibility:
        # One rank against all others: n pairs for each of its runs, not n * n.
        keys = np.flatnonzero(self._keys.owners != rank)
        return self._compared(keys, np.flatnonzero(self._queries.owners == rank))

    def visibility_of(self, source: int) -> Visibility:
        queries = np.flatnonzero(self._queries.owners != source)
        return self._compared(np.flatnonzero(self._keys.owners == source), queries)

    @cached_property
    def last_hops(self) -> LastHop:
        blocks = [np.zeros((4, 0), dtype=np.int64)]
        for sources, viewers, firsts, ends in self.visibility():  # all of a source is in one block
            distances = (viewers - sources) % self.world_size
            blocks.append(np.stack(topmost(sources, firsts, ends, distances)))
        return LastHop._make(np.concatenate(blocks, axis=1))

    def _compared(self, keys: np.ndarray, queries: np.ndarray) -> Visibility:
        """Return the columns of runs of keys that runs of queries of other ranks see."""
        key, query = np.repeat(keys, len(queries)), np.tile(queries, len(keys))
        # A rank needs nothing from itself.
        is_other = self._keys.owners[key] != self._queries.owners[query]
        key, query = key[is_other], query[is_other]
        # Unite the rows of the batch: one packet serves them all.
        seen_in = self._seen if self._is_exact else self._bounding_spans
        found = [seen_in(key, query, table) for table in self._tables]
        pairs, firsts, ends = map(np.concatenate, zip(*found, strict=True))
        key, query = key[pairs], query[pairs]
        cols, source = self._keys.cols[key], self._keys.owners[key]
        found = Visibility(source, self._queries.owners[query], firsts + cols, ends + cols)
        return found.united(self.world_size)

    def _seen(
        self, key: np.ndarray, query: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return indices of pairs, and the columns that each sees in a slice; none is empty."""
        firsts, ends = self._columns(key, query, table.T[:, :, None])
        slices, pairs = np.nonzero(firsts < ends)
        return pairs, firsts[slices, pairs], ends[slices, pairs]

    def _bounding_spans(
        self, key: np.ndarray, query: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return indices of pairs, and the columns from the first one seen to the last one."""
        # If keys ascend from slice to slice, the first slice that shows any has the first column.
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
        """Return each pair's columns in the first slice that shows it any, else (0, 0)."""
        firsts, ends = np.zeros((2, len(key)), dtype=np.int64)
        todo = np.arange(len(key))
        # The first document settles most pairs: only the others go on to the next one.
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
        """Return first and end of the columns that each pair sees in a slice; empty if none.

        Args:
            key: index of each pair's run of keys.
            query: index of each pair's run of queries.
            cut: one slice, `(6,)`; or all slices of a table, `(6, slices, 1)`, for results of shape
                `(slices, pairs)`.
        """
        # The columns are contiguous: they are the bounding box of what `tile._band_tiles` cuts.
        # Bounds of positions become bounds of indices, which trim the rectangle from all sides.
        # Cut each run to the slice first; indices then count from the first token inside it.
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


def _indices(sharding: ShardTable, span: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each run's first token in a span, and the number of its tokens there."""
    # Rounded up, as -(-a // b): the first token at or after each end of the span.
    first = np.maximum(0, -((sharding.starts - span[0]) // sharding.stride))
    end = np.minimum(sharding.lengths, -((sharding.starts - span[1]) // sharding.stride))
    return first, end - first
