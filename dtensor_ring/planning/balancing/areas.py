"""Visible pairs of ranges of queries, in closed form: no tile is built."""

from __future__ import annotations

import numpy as np

from dtensor_ring.planning.masks.slices import Slices
from dtensor_ring.planning.masks.tables import stacked
from dtensor_ring.planning.values.span import Span

EXACT = 2**58
"""Sums of fewer pairs, 16 times them, and the terms of the closed form are exact in int64."""


def visible_pairs(slices: Slices, queries: Span) -> int:
    """Pairs that a range of queries sees, summed over the rows of the slices."""
    table = exact_table(slices)
    return int(areas(table, *(np.full(len(table), x, dtype=table.dtype) for x in queries)).sum())


def exact_table(slices: Slices) -> np.ndarray:
    """The slices of all rows as one table `(N, 6)`; of Python integers if int64 is too small."""
    table = stacked(slices.tables)
    num_queries, num_keys = (int(table[:, column].max(initial=0)) for column in (1, 3))
    is_exact = len(slices) * num_queries * num_keys < EXACT and num_queries + num_keys < 2**31
    return table if is_exact else table.astype(object)


def areas(table: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Pairs that queries from `begins` up to `ends` see, by slice: one range for each.

    Query q sees the keys of `[k_begin, k_end)` in `[q - left, q + right + 1)`. With
    h(x) = max(0, x) their number is h(q + right + 1 - k_begin) - h(q + right + 1 - k_end) -
    h(q - left - k_begin) + h(q - left - k_end). A sum of h over consecutive numbers is a
    difference of triangles.
    """
    q_begin, q_end, k_begin, k_end, left, right = table.T
    begins = np.maximum(begins, q_begin)
    ends = np.maximum(begins, np.minimum(ends, q_end))
    # No lag of the slice is outside of these: unbounded ones would not fit into squares.
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
    """The sum of max(0, q + shift) over the queries of each range."""
    return _triangle(ends + shift) - _triangle(begins + shift)


def _triangle(x: np.ndarray) -> np.ndarray:
    """1 + 2 + ... + (x - 1)."""
    x = np.maximum(x, 0)
    return x * (x - 1) // 2
