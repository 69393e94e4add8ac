"""The work of an attention by position: visible pairs in closed form, without tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.ranges import Span, expanded
from dtensor_ring.planning.slice_tables import stacked
from dtensor_ring.planning.slices import Slices

# Below this number of pairs, sums, 16 times sums, and terms of the closed form are exact in int64.
EXACT = 2**58


def visible_pairs(slices: Slices, queries: Span) -> int:
    """Return the number of pairs that a range of queries sees, summed over the batch rows."""
    table = exact_table(slices)
    return int(areas(table, *(np.full(len(table), x, dtype=table.dtype) for x in queries)).sum())


def exact_table(slices: Slices) -> np.ndarray:
    """Return all rows as one table `(N, 6)`; it has Python integers if int64 is too small."""
    table = stacked(slices.tables)
    num_queries, num_keys = (int(table[:, column].max(initial=0)) for column in (1, 3))
    is_exact = len(slices) * num_queries * num_keys < EXACT and num_queries + num_keys < 2**31
    return table if is_exact else table.astype(object)


def areas(table: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return for each slice the number of pairs that its queries in `[begins, ends)` see.

    Query q sees the keys of `[k_begin, k_end)` in `[q - left, q + right + 1)`. With
    h(x) = max(0, x) their number is h(q + right + 1 - k_begin) - h(q + right + 1 - k_end) -
    h(q - left - k_begin) + h(q - left - k_end). A sum of h over consecutive numbers is a
    difference of triangle numbers.
    """
    q_begin, q_end, k_begin, k_end, left, right = table.T
    begins = np.maximum(begins, q_begin)
    ends = np.maximum(begins, np.minimum(ends, q_end))
    # Clip bounds to the lags of the slice, as the square of `UNBOUNDED` would overflow.
    least, most = q_begin - k_end + 1, q_end - 1 - k_begin
    back = np.minimum(np.maximum(left, least - 1), most)
    ahead = np.minimum(np.maximum(right, -most - 1), -least)
    return (
        _summed(begins, ends, ahead + 1 - k_begin)
        - _summed(begins, ends, ahead + 1 - k_end)
        - _summed(begins, ends, -back - k_begin)
        + _summed(begins, ends, -back - k_end)
    )


def _summed(begins: np.ndarray, ends: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return the sum of max(0, q + shift) over the queries q of each range."""
    return _triangle(ends + shift) - _triangle(begins + shift)


def _triangle(x: np.ndarray) -> np.ndarray:
    """Return 1 + 2 + ... + (x - 1)."""
    x = np.maximum(x, 0)
    return x * (x - 1) // 2


class Units(NamedTuple):
    """Ranges of positions, in order, that see nothing of one another and cover the sequence.

    Attributes:
        begins: first position of each unit.
        ends: position after the last one of each unit.
        areas: number of pairs that the queries of each unit see, over all batch rows; 0 outside
            of all slices.
    """

    begins: np.ndarray
    ends: np.ndarray
    areas: np.ndarray


class AttentionWork:
    """The slices of all batch rows in one table, which answers what ranges of queries see.

    Attributes:
        table: the slices with visible pairs, sorted by query begin; see `exact_table`.
        total: number of all visible pairs.
        num_rows: number of batch rows in the slices.
    """

    def __init__(self, slices: Slices) -> None:
        table, self.num_rows = exact_table(slices), len(slices)
        table = table[np.argsort(table[:, 0].astype(np.int64), kind="stable")]
        found = areas(table, table[:, 0], table[:, 1])
        self.table, self._areas = table[found > 0], found[found > 0]
        self.total = int(found.sum())
        self._begins = self.table[:, 0].astype(np.int64)
        # Slices may end in any order, but a search needs ascending ends.
        self._ends = np.maximum.accumulate(self.table[:, 1].astype(np.int64))

    def areas(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the number of pairs that each range of queries sees."""
        ranges, slices = self._overlaps(begins, ends)
        result = np.zeros(len(begins), dtype=self.table.dtype)
        np.add.at(result, ranges, areas(self.table[slices], begins[ranges], ends[ranges]))
        return result

    def seen(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return ranges of queries, their slices, and the begins and ends of the keys they see."""
        ranges, slices = self._overlaps(begins, ends)
        q_begin, q_end, k_begin, k_end, left, right = self.table[slices].T
        q_begin, q_end = np.maximum(begins[ranges], q_begin), np.minimum(ends[ranges], q_end)
        # Later queries see later keys: the first query sees the first key, the last the last.
        first, end = np.maximum(k_begin, q_begin - left), np.minimum(k_end, q_end + right)
        kept = np.flatnonzero((q_begin < q_end) & (first < end))
        return ranges[kept], slices[kept], *(x[kept].astype(np.int64) for x in (first, end))

    def units(self, seq_len: int, block: int) -> Units:
        """Return the units of the sequence; short neighbours in the same block are joined."""
        bounds, found = self._parts(seq_len)
        starts, is_long = bounds[:-1], np.diff(bounds) >= block
        # Join neighbours shorter than a block that begin in the same block of the sequence.
        is_new = (starts[1:] // block != starts[:-1] // block) | is_long[1:] | is_long[:-1]
        first = np.flatnonzero(np.append(True, is_new))[: len(starts)]
        areas_of = np.add.reduceat(found, first) if len(first) else found
        return Units(starts[first], bounds[np.append(first[1:], -1)][: len(first)], areas_of)

    def cuts(self, units: Units, num_parts: np.ndarray) -> list[np.ndarray]:
        """Return for each unit the edges of parts of equal area: `num_parts + 1` positions."""
        of, part = expanded(np.zeros_like(num_parts), num_parts + 1)
        # Divide first, as the product of an area and a number of parts might overflow.
        share, rest = units.areas[of] // num_parts[of], units.areas[of] % num_parts[of]
        goals = share * part + rest * part // num_parts[of]
        begins, low, high = (x[of] for x in (units.begins, units.begins, units.ends))
        # Bisect all edges at once for the first position with enough area before it.
        while (low < high).any():
            middle = (low + high) // 2
            is_less = (self.areas(begins, middle) < goals) & (low < high)
            low, high = np.where(is_less, middle + 1, low), np.where(is_less, high, middle)
        low = np.where(part == num_parts[of], units.ends[of], low)  # the last part ends the unit
        return np.split(low, np.cumsum(num_parts + 1)[:-1])

    def _overlaps(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs (range, slice): for each range, all slices from its first to its last."""
        first = np.searchsorted(self._ends, begins, "right")
        return expanded(first, np.searchsorted(self._begins, ends, "left"))

    def _parts(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds of connected parts of the sequence and of gaps, and their areas."""
        q_begin, q_end, k_begin, k_end, left, right = self.table.T
        begins = np.minimum(q_begin, np.maximum(k_begin, q_begin - left)).astype(np.int64)
        ends = np.maximum(q_end, np.minimum(k_end, q_end + right)).astype(np.int64)
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        # A part begins where all earlier slices have ended.
        first = np.flatnonzero(np.append(True, begins[1:] >= ends[:-1]))[: len(begins)]
        last = np.append(first[1:], len(begins))[: len(first)] - 1
        bounds = np.unique(np.concatenate([[0, seq_len], begins[first], ends[last]]))
        found = np.zeros(len(bounds) - 1, dtype=self.table.dtype)
        if len(first):
            at = np.searchsorted(bounds, begins[first])
            found[at] = np.add.reduceat(self._areas[order], first)
        return bounds, found
