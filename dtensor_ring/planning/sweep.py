"""Demand where runs hold neighbouring positions: a search in sorted segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtensor_ring.planning.demand import Needs, Reach, Sights, source_blocks
from dtensor_ring.planning.ranges import expanded, topmost
from dtensor_ring.planning.run_table import Dealing
from dtensor_ring.planning.slice_tables import stacked
from dtensor_ring.planning.slices import Slices


class WaveletMatrix:
    """Answers how many values of a range are small, and which is the k-th smallest.

    Each query takes one step for each bit of the values (SPIRE 2012, "The Wavelet Matrix", doi
    10.1007/978-3-642-34109-0_18). All queries of a call go through a step together, as arrays.

    Args:
        values: integers from 0 to `num_values - 1`.
        num_values: how many different values there may be.
    """

    def __init__(self, values: np.ndarray, num_values: int) -> None:
        self._levels: list[tuple[int, np.ndarray, int]] = []
        # The highest bit first: what it decides, no lower one can change.
        for bit in reversed(range(max(1, (num_values - 1).bit_length()))):
            is_zero = (values >> bit) & 1 == 0
            # zeros[i] counts them before i, so the zeros of any range are a difference.
            zeros = np.concatenate([[0], np.cumsum(is_zero)])
            self._levels.append((bit, zeros, int(zeros[-1])))
            # Values without the bit go first, in their order: a range stays two ranges, at most.
            values = np.concatenate([values[is_zero], values[~is_zero]])

    @property
    def num_bytes(self) -> int:
        """Memory of the counts, in bytes."""
        return sum(zeros.nbytes for _, zeros, _ in self._levels)

    def count_below(self, begin: np.ndarray, end: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """How many values of each range `[begin, end)` are below that range's limit."""
        count = np.zeros_like(begin)
        for bit, zeros, num_zeros in self._levels:
            has_bit = (limit >> bit) & 1 == 1
            first, last = zeros[begin], zeros[end]
            count += np.where(has_bit, last - first, 0)  # those without the bit are below
            # Follow the values that share the limit's bit into their half of the next level.
            begin = np.where(has_bit, num_zeros + begin - first, first)
            end = np.where(has_bit, num_zeros + end - last, last)
        return count

    def kth(self, begin: np.ndarray, end: np.ndarray, k: np.ndarray) -> np.ndarray:
        """The value number `k`, in ascending order from 0, of each range; none may be empty."""
        value = np.zeros_like(begin)
        for bit, zeros, num_zeros in self._levels:
            first, last = zeros[begin], zeros[end]
            # Values without the bit are smaller: the k-th has it if there are not enough of those.
            has_bit = k >= last - first
            k = np.where(has_bit, k - (last - first), k)
            value |= has_bit.astype(value.dtype) << bit
            begin = np.where(has_bit, num_zeros + begin - first, first)
            end = np.where(has_bit, num_zeros + end - last, last)
        return value


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of all ranks, cut by slices: arrays, by slice, then in the order of positions.

    The slices of all batch rows follow one another in one long line of positions, and are numbered
    through, so that one search serves them all.
    """

    begins: np.ndarray
    ends: np.ndarray
    owners: np.ndarray
    cols: np.ndarray
    """Where in the shard of its owner the segment begins."""
    numbers: np.ndarray
    """Of the slice."""


def _segments(dealing: Dealing, ranges: np.ndarray, line: int) -> Segments:
    """Cut the runs by ranges of positions, one for each slice; each takes `line` positions."""
    begins, ends = ranges.T
    # From the first run that ends late enough to the last that begins in time.
    first = np.searchsorted(dealing.starts + dealing.lengths, begins, "right")
    after = np.searchsorted(dealing.starts, ends, "left")
    numbers, runs = expanded(first, after)
    starts = dealing.starts[runs]
    begins = np.maximum(begins[numbers], starts)
    ends = np.minimum(ends[numbers], starts + dealing.lengths[runs])
    cols = dealing.cols[runs] + begins - starts
    # Slices lie `line` apart, further than any lag, so no search crosses into another one.
    shift = numbers * line
    return Segments(begins + shift, ends + shift, dealing.owners[runs], cols, numbers)


def _merged(segments: Segments) -> Segments:
    """Neighbours of one slice and one owner as one segment."""
    # With owners that alternate, the first viewer that is not the source is the first or second.
    is_new = np.diff(segments.owners, prepend=-1) | np.diff(segments.numbers, prepend=-1)
    first = np.flatnonzero(is_new)
    last = np.append(first, len(is_new))[1:] - 1
    kept = (x[first] for x in vars(segments).values())
    begins, _, *others = kept
    return Segments(begins, segments.ends[last], *others)


class SweptNeeds(Needs):
    """Each segment of keys is seen by a range of segments of queries: a search finds it.

    The time is O(n log n) for n runs, each counted in every slice that cuts it, whatever the number
    of pairs of ranks.
    """

    def __init__(self, queries: Dealing, keys: Dealing, slices: Slices) -> None:
        self.world_size = len(keys.shards)
        table = stacked(slices.tables)
        line = 1 + int(table[:, :4].max(initial=0))
        self._queries = _merged(_segments(queries, table[:, :2], line))
        self._keys = _segments(keys, table[:, 2:4], line)
        # Nothing within a slice is as long as its line: that is as good as unbounded, and sums fit.
        left, right = np.clip(table[:, 4:], -line, line).T
        # A rank sees all between two of its segments of queries that lie no further apart.
        self._widths = (left + right)[self._queries.numbers]
        # By segment of keys.
        self._left, self._right = left[self._keys.numbers], right[self._keys.numbers]
        every = np.arange(len(self._keys.begins))
        self._begin, self._end = self._viewers(every, self._keys.begins, self._keys.ends)

    def _viewers(
        self, keys: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The range of the segments of queries that see any of each part of a segment of keys.

        Args:
            keys: the segment.
            begins: first position of the part.
            ends: one after its last.
        """
        queries, numbers = self._queries, self._keys.numbers[keys]
        # The band: from the first segment that ends late enough to the last that begins in time.
        begin = np.searchsorted(queries.ends, begins - self._right[keys], "right")
        end = np.searchsorted(queries.begins, ends - 1 + self._left[keys], "right")
        # The slice: none before its first segment, none after its last.
        begin = np.maximum(begin, np.searchsorted(queries.numbers, numbers))
        end = np.minimum(end, np.searchsorted(queries.numbers, numbers, "right"))
        # An empty range must stay empty, with begin = end, for the searches that use it.
        return begin, np.maximum(begin, end)

    @property
    def num_bytes(self) -> int:
        sides = (x.nbytes for side in (self._queries, self._keys) for x in vars(side).values())
        # A segment of keys makes a span on each leg of its packet, a tuple of two numbers; few do.
        spans = 200 * self.world_size + 300 * len(self._keys.begins)
        return 2 * sum(sides) + self._by_owner.nbytes + spans

    def sights(self) -> Iterator[Sights]:
        # A key has at most one sight for each rank, however many segments see it.
        num_pairs = np.minimum(self._end - self._begin, self.world_size)
        for keys in source_blocks(self._keys.owners, num_pairs):
            yield self._sights_of(keys)

    def sights_by(self, rank: int) -> Sights:
        # The segments of this rank among those that see a key are a range of its own list.
        own = np.flatnonzero(self._queries.owners == rank)
        begin, end = np.searchsorted(own, self._begin), np.searchsorted(own, self._end)
        seen = np.flatnonzero((begin < end) & (self._keys.owners != rank))
        unbroken = self._unbroken(own, seen, begin[seen], end[seen])
        return self._sights(*unbroken).united(self.world_size)

    def sights_of(self, source: int) -> Sights:
        return self._sights_of(np.flatnonzero(self._keys.owners == source))

    @cached_property
    def reach(self) -> Reach:
        keys, begins, ends = self._alike()
        begin, end = self._viewers(keys, begins, ends)
        seen = np.flatnonzero(begin < end)
        keys, begins, ends, begin, end = (x[seen] for x in (keys, begins, ends, begin, end))
        owners, ranks = (
            self._keys.owners[keys],
            WaveletMatrix(self._queries.owners, self.world_size),
        )
        # Furthest on the ring is the highest rank below the source, a lap on, or else the highest.
        below = ranks.count_below(begin, end, owners)
        furthest = ranks.kth(begin, end, np.where(below > 0, below, end - begin) - 1)
        distances = (furthest - owners) % self.world_size
        to_col = self._keys.cols[keys] - self._keys.begins[keys]
        others = np.flatnonzero(distances)  # what only its owner sees goes nowhere
        columns = owners, begins + to_col, ends + to_col, distances
        return Reach(*topmost(*(x[others] for x in columns)))

    def _alike(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Parts of segments of keys, whose positions are seen by the same segments of queries."""
        queries, keys = self._queries, self._keys
        starts = [keys.begins]
        # A segment of queries no longer sees what is `right` after its end, and sees what is `left`
        # before its begin.
        for edges, lags in ((queries.ends, self._right), (queries.begins, -self._left)):
            first = np.searchsorted(edges, keys.begins - lags, "right")
            which, edge = expanded(first, np.searchsorted(edges, keys.ends - lags, "left"))
            starts.append(edges[edge] + lags[which])
        begins = np.unique(np.concatenate(starts))
        which = np.searchsorted(keys.begins, begins, "right") - 1
        return which, begins, np.minimum(np.append(begins[1:], keys.ends[-1:]), keys.ends[which])

    def _sights_of(self, keys: np.ndarray) -> Sights:
        """Columns of these segments of keys that other ranks see."""
        begin, end = self._begin[keys], self._end[keys]
        # Few pairs are written out; of many, each viewer is searched for its first and last.
        if (end - begin).sum() <= len(keys) * self.world_size:
            which, queries = expanded(begin, end)
            found = self._sights(keys[which], queries, queries)
        else:
            found = self._sights(*self._by_viewer(keys, begin, end))
        is_other = found.sources != found.viewers
        return Sights(*(x[is_other] for x in found)).united(self.world_size)

    def _by_viewer(
        self, keys: np.ndarray, begin: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Segment of keys, and the first and last segment of queries, of each viewer that has any.

        Segments that see a key and are owned by one rank are a range of those of that rank.
        """
        num_queries = len(self._queries.owners)
        ranks = np.arange(self.world_size)[:, None] * num_queries
        first = np.searchsorted(self._by_owner, ranks + begin)
        after = np.searchsorted(self._by_owner, ranks + end)
        # Few of all pairs of viewer and key have any segment: only those go on.
        viewer, key = np.nonzero(first < after)
        order = self._by_owner % num_queries
        return self._unbroken(order, keys[key], first[viewer, key], after[viewer, key])

    def _unbroken(
        self, order: np.ndarray, keys: np.ndarray, begin: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Segment of keys, and the first and last segment of queries, that see it without a gap.

        Args:
            order: segments of queries, those of a rank one after the other.
            keys: segments of keys.
            begin: where in `order` the segments of one rank that see the key begin.
            end: where they end.
        """
        queries, before, after = self._queries, order[:-1], order[1:]
        is_wide = queries.begins[after] - queries.ends[before] > self._widths[after]
        # Segments of two slices are never in one range, however far apart they are.
        cuts = np.flatnonzero(is_wide & (queries.numbers[before] == queries.numbers[after])) + 1
        which, begin, end = _cut(begin, end, cuts)
        return keys[which], order[begin], order[end - 1]

    @cached_property
    def _by_owner(self) -> np.ndarray:
        """Segments of queries by owner, then position: `owner * num_queries + index`, sorted."""
        num_queries = len(self._queries.owners)
        return np.sort(self._queries.owners * num_queries + np.arange(num_queries))

    def _sights(self, keys: np.ndarray, first: np.ndarray, last: np.ndarray) -> Sights:
        """The columns of segments of keys that the queries of a rank see, first to last of them."""
        begins, ends = self._keys.begins[keys], self._keys.ends[keys]
        # Later queries see later keys: the first query has the first column, the last the last.
        lowest = np.maximum(begins, self._queries.begins[first] - self._left[keys])
        highest = np.minimum(ends, self._queries.ends[last] + self._right[keys])
        # Within a segment, positions and columns differ by a constant.
        to_col = self._keys.cols[keys] - begins
        sources, viewers = self._keys.owners[keys], self._queries.owners[first]
        return Sights(sources, viewers, lowest + to_col, highest + to_col)


def _cut(
    begin: np.ndarray, end: np.ndarray, cuts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut ranges at the cuts that lie within them; returns whose part each is, and its range.

    Args:
        begin: of each range.
        end: of each range.
        cuts: ascending.
    """
    if not len(cuts):
        return np.arange(len(begin)), begin, end
    # A range goes from one cut to the next, and is one part more than there are cuts in it.
    low, high = np.searchsorted(cuts, begin, "right"), np.searchsorted(cuts, end, "left")
    which, number = expanded(low, high + 1)
    begins, ends = np.append(0, cuts), np.append(cuts, np.iinfo(np.int64).max)
    return which, np.maximum(begin[which], begins[number]), np.minimum(end[which], ends[number])
