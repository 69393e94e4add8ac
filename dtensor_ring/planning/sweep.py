"""Needs of ranks if runs hold adjacent positions, found by a search in sorted segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtensor_ring.planning.demand import KeyDemand, LastHop, Visibility, source_blocks
from dtensor_ring.planning.ranges import expanded, topmost
from dtensor_ring.planning.run_table import ShardTable
from dtensor_ring.planning.slice_tables import stacked
from dtensor_ring.planning.slices import Slices


class WaveletMatrix:
    """Count the values of a range below a limit, and find its k-th smallest value.

    Each query takes one step for each bit of the values (SPIRE 2012, "The Wavelet Matrix", doi
    10.1007/978-3-642-34109-0_18). All queries of a call take a step together, as arrays.

    Args:
        values: integers from 0 to `num_values - 1`.
        num_values: upper bound of the values, exclusive.
    """

    def __init__(self, values: np.ndarray, num_values: int) -> None:
        self._levels: list[tuple[int, np.ndarray, int]] = []
        # Start with the highest bit, because it decides a comparison before all lower ones.
        for bit in reversed(range(max(1, (num_values - 1).bit_length()))):
            is_zero = (values >> bit) & 1 == 0
            # zeros[i] counts the zeros before i, so the count of any range is a difference.
            zeros = np.concatenate([[0], np.cumsum(is_zero)])
            self._levels.append((bit, zeros, int(zeros[-1])))
            # A stable partition: the values of a range with equal bits stay adjacent.
            values = np.concatenate([values[is_zero], values[~is_zero]])

    @property
    def num_bytes(self) -> int:
        """Memory of the counts, in bytes."""
        return sum(zeros.nbytes for _, zeros, _ in self._levels)

    def count_below(self, begin: np.ndarray, end: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """Return how many values of each range `[begin, end)` are below that range's limit."""
        count = np.zeros_like(begin)
        for bit, zeros, num_zeros in self._levels:
            has_bit = (limit >> bit) & 1 == 1
            first, last = zeros[begin], zeros[end]
            count += np.where(has_bit, last - first, 0)  # values without the bit are below
            # Follow the values that share the limit's bit into their half of the next level.
            begin = np.where(has_bit, num_zeros + begin - first, first)
            end = np.where(has_bit, num_zeros + end - last, last)
        return count

    def kth(self, begin: np.ndarray, end: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Return the k-th smallest value of each range, counted from 0; no range may be empty."""
        value = np.zeros_like(begin)
        for bit, zeros, num_zeros in self._levels:
            first, last = zeros[begin], zeros[end]
            # Values without the bit are smaller, so the k-th has the bit if they are k or fewer.
            has_bit = k >= last - first
            k = np.where(has_bit, k - (last - first), k)
            value |= has_bit.astype(value.dtype) << bit
            begin = np.where(has_bit, num_zeros + begin - first, first)
            end = np.where(has_bit, num_zeros + end - last, last)
        return value


@dataclass(frozen=True, eq=False)
class RunSegments:
    """Runs of all ranks, cut by slices: one entry for each segment, by slice, then by position.

    The slices of all batch rows follow one another on one long line of positions, with one
    numbering, so that one search serves all of them.

    Attributes:
        begins: first position on the line.
        ends: position after the last one on the line.
        owners: the rank that holds the segment.
        cols: index in its owner's shard at which the segment begins.
        numbers: the number of the slice.
    """

    begins: np.ndarray
    ends: np.ndarray
    owners: np.ndarray
    cols: np.ndarray
    numbers: np.ndarray


def _segments(sharding: ShardTable, ranges: np.ndarray, line: int) -> RunSegments:
    """Cut the runs by one range of positions for each slice, `line` positions apart."""
    begins, ends = ranges.T
    # From the first run that ends after the begin, to the last that begins before the end.
    first = np.searchsorted(sharding.starts + sharding.lengths, begins, "right")
    after = np.searchsorted(sharding.starts, ends, "left")
    numbers, runs = expanded(first, after)
    starts = sharding.starts[runs]
    begins = np.maximum(begins[numbers], starts)
    ends = np.minimum(ends[numbers], starts + sharding.lengths[runs])
    cols = sharding.cols[runs] + begins - starts
    # Slices lie `line` apart, more than any lag, so no search reaches another slice.
    # Two slices of 8 tokens are 9 apart: a run of the positions 4 to 7 that both of them cut is
    # the segments [4, 8) and [13, 17).
    shift = numbers * line
    return RunSegments(begins + shift, ends + shift, sharding.owners[runs], cols, numbers)


def _merged(segments: RunSegments) -> RunSegments:
    """Join adjacent segments that have the same slice and owner."""
    # Joined owners alternate, so the first viewer other than the source is the first or second.
    is_new = np.diff(segments.owners, prepend=-1) | np.diff(segments.numbers, prepend=-1)
    first = np.flatnonzero(is_new)
    last = np.append(first, len(is_new))[1:] - 1
    firsts = {name: x[first] for name, x in vars(segments).items()}
    return RunSegments(**firsts | {"ends": segments.ends[last]})


class SortedDemand(KeyDemand):
    """A search finds the range of query segments that see each key segment.

    It takes O(n log n) for n segments, independent of the number of pairs of ranks. A run counts
    once for each slice that cuts it.
    """

    def __init__(self, queries: ShardTable, keys: ShardTable, slices: Slices) -> None:
        self.world_size = len(keys.shards)
        table = stacked(slices.tables)
        line = 1 + int(table[:, :4].max(initial=0))
        self._queries = _merged(_segments(queries, table[:, :2], line))
        self._keys = _segments(keys, table[:, 2:4], line)
        # No lag within a slice reaches `line`, so it stands for unbounded, and sums of it fit.
        left, right = np.clip(table[:, 4:], -line, line).T
        # A rank sees every key between two of its query segments at most this far apart.
        self._widths = (left + right)[self._queries.numbers]
        # The bounds of each key segment.
        self._left, self._right = left[self._keys.numbers], right[self._keys.numbers]
        every = np.arange(len(self._keys.begins))
        self._begin, self._end = self._viewers(every, self._keys.begins, self._keys.ends)

    def _viewers(
        self, keys: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the range of query segments that see any of each part of a key segment.

        Args:
            keys: the key segment of each part.
            begins: first position of each part.
            ends: position after the last one of each part.
        """
        queries, numbers = self._queries, self._keys.numbers[keys]
        # The band: the first segment that ends late enough, to the last that begins early enough.
        begin = np.searchsorted(queries.ends, begins - self._right[keys], "right")
        end = np.searchsorted(queries.begins, ends - 1 + self._left[keys], "right")
        # The slice: exclude segments before its first and after its last.
        begin = np.maximum(begin, np.searchsorted(queries.numbers, numbers))
        end = np.minimum(end, np.searchsorted(queries.numbers, numbers, "right"))
        # The searches that use a range need begin = end if it is empty.
        return begin, np.maximum(begin, end)

    @property
    def num_bytes(self) -> int:
        sides = (x.nbytes for side in (self._queries, self._keys) for x in vars(side).values())
        # Key segments become spans, tuples of two numbers, on the stages of packets.
        spans = 200 * self.world_size + 300 * len(self._keys.begins)
        return 2 * sum(sides) + self._by_owner.nbytes + spans

    def visibility(self) -> Iterator[Visibility]:
        # A key segment has at most one span for each rank, however many query segments see it.
        num_pairs = np.minimum(self._end - self._begin, self.world_size)
        for keys in source_blocks(self._keys.owners, num_pairs):
            yield self._visibility_of(keys)

    def visible_to(self, rank: int) -> Visibility:
        # Query segments of this rank that see a key segment are a range of the rank's own list.
        own = np.flatnonzero(self._queries.owners == rank)
        begin, end = np.searchsorted(own, self._begin), np.searchsorted(own, self._end)
        seen = np.flatnonzero((begin < end) & (self._keys.owners != rank))
        keys, first, last = self._unbroken(own, seen, begin[seen], end[seen])
        return self._visibility(keys, first, last).united(self.world_size)

    def visibility_of(self, source: int) -> Visibility:
        return self._visibility_of(np.flatnonzero(self._keys.owners == source))

    @cached_property
    def last_hops(self) -> LastHop:
        keys, begins, ends = self._alike()
        begin, end = self._viewers(keys, begins, ends)
        seen = np.flatnonzero(begin < end)
        keys, begins, ends, begin, end = (x[seen] for x in (keys, begins, ends, begin, end))
        owners, ranks = (
            self._keys.owners[keys],
            WaveletMatrix(self._queries.owners, self.world_size),
        )
        # The ring wraps: the furthest viewer is the highest rank below the source, or the highest.
        below = ranks.count_below(begin, end, owners)
        furthest = ranks.kth(begin, end, np.where(below > 0, below, end - begin) - 1)
        distances = (furthest - owners) % self.world_size
        to_col = self._keys.cols[keys] - self._keys.begins[keys]
        others = np.flatnonzero(distances)  # columns that only their owner sees do not travel
        found = topmost(
            owners[others], (begins + to_col)[others], (ends + to_col)[others], distances[others]
        )
        return LastHop._make(found)

    def _alike(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut key segments into parts whose positions are all seen by the same query segments."""
        queries, keys = self._queries, self._keys
        starts = [keys.begins]
        # The viewers change at `right` after the end of a query segment, and at `left` before its
        # begin.
        for edges, lags in ((queries.ends, self._right), (queries.begins, -self._left)):
            first = np.searchsorted(edges, keys.begins - lags, "right")
            which, edge = expanded(first, np.searchsorted(edges, keys.ends - lags, "left"))
            starts.append(edges[edge] + lags[which])
        begins = np.unique(np.concatenate(starts))
        which = np.searchsorted(keys.begins, begins, "right") - 1
        return which, begins, np.minimum(np.append(begins[1:], keys.ends[-1:]), keys.ends[which])

    def _visibility_of(self, keys: np.ndarray) -> Visibility:
        """Return the columns of these key segments that other ranks see."""
        begin, end = self._begin[keys], self._end[keys]
        # Expand the pairs if they are few, otherwise search the first and last for each viewer.
        if (end - begin).sum() <= len(keys) * self.world_size:
            which, queries = expanded(begin, end)
            found = self._visibility(keys[which], queries, queries)
        else:
            seen, first, last = self._by_viewer(keys, begin, end)
            found = self._visibility(seen, first, last)
        is_other = found.sources != found.viewers
        found = Visibility._make(x[is_other] for x in found)
        return found.united(self.world_size)

    def _by_viewer(
        self, keys: np.ndarray, begin: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the key segment, and the first and last query segment, for each viewer of it."""
        # The query segments of one rank that see a key segment are a range in that rank's list.
        num_queries = len(self._queries.owners)
        ranks = np.arange(self.world_size)[:, None] * num_queries
        first = np.searchsorted(self._by_owner, ranks + begin)
        after = np.searchsorted(self._by_owner, ranks + end)
        # Most pairs of viewer and key have no segment; keep only the others.
        viewer, key = np.nonzero(first < after)
        order = self._by_owner % num_queries
        return self._unbroken(order, keys[key], first[viewer, key], after[viewer, key])

    def _unbroken(
        self, order: np.ndarray, keys: np.ndarray, begin: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the key segment, and the first and last query segment that see it without a gap.

        Args:
            order: query segments, grouped by rank.
            keys: key segments.
            begin: index in `order` of the first query segment of one rank that sees the key.
            end: index in `order` after the last one.
        """
        queries, before, after = self._queries, order[:-1], order[1:]
        is_wide = queries.begins[after] - queries.ends[before] > self._widths[after]
        # A range never holds segments of two slices, so a gap between slices needs no cut.
        cuts = np.flatnonzero(is_wide & (queries.numbers[before] == queries.numbers[after])) + 1
        which, begin, end = _cut(begin, end, cuts)
        return keys[which], order[begin], order[end - 1]

    @cached_property
    def _by_owner(self) -> np.ndarray:
        """Query segments by owner, then position: `owner * num_queries + index`, sorted."""
        num_queries = len(self._queries.owners)
        return np.sort(self._queries.owners * num_queries + np.arange(num_queries))

    def _visibility(self, keys: np.ndarray, first: np.ndarray, last: np.ndarray) -> Visibility:
        """Return the columns of key segments that a rank's query segments `first` to `last` see."""
        begins, ends = self._keys.begins[keys], self._keys.ends[keys]
        # Later queries see later keys: the first query sees the first column, the last the last.
        lowest = np.maximum(begins, self._queries.begins[first] - self._left[keys])
        highest = np.minimum(ends, self._queries.ends[last] + self._right[keys])
        # Within a segment, positions and columns differ by a constant.
        to_col = self._keys.cols[keys] - begins
        sources, viewers = self._keys.owners[keys], self._queries.owners[first]
        return Visibility(sources, viewers, lowest + to_col, highest + to_col)


def _cut(
    begin: np.ndarray, end: np.ndarray, cuts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut ranges at the cuts within them; return the index of the range, begin and end of parts.

    Args:
        begin: begin of each range.
        end: end of each range.
        cuts: where to cut, ascending.
    """
    if not len(cuts):
        return np.arange(len(begin)), begin, end
    # A range has one part more than it has cuts.
    low, high = np.searchsorted(cuts, begin, "right"), np.searchsorted(cuts, end, "left")
    which, number = expanded(low, high + 1)
    begins, ends = np.append(0, cuts), np.append(cuts, np.iinfo(np.int64).max)
    return which, np.maximum(begin[which], begins[number]), np.minimum(end[which], ends[number])
