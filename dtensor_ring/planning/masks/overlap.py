"""Pairs of a query and a key that are in two slices of a table: they would count twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.values.ranges import numbered

CHUNK = 2**18
"""Pairs of slices that are compared at once."""

MAX_PAIRS = 2**25
"""Pairs of slices that are compared at all, in a few seconds."""


class Overlap(NamedTuple):
    """Two slices, as rows of a table, and a pair that both have."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    query: int
    key: int


def find_overlap(table: np.ndarray) -> Overlap | None:
    """One overlap of the slices `(N, 6)`, or `None` if they are disjoint.

    Raises:
        ValueError: if slices lie side by side in so many ways that it takes too long to tell.
    """
    for first, second in _near(table):
        lowest, highest = _common(first, second)
        meet = (lowest <= highest).all(axis=0)
        if meet.any():
            at = int(meet.argmax())
            query_key = _pair(lowest[:, at], highest[:, at])
            return Overlap(tuple(first[at].tolist()), tuple(second[at].tolist()), *query_key)
    return None


def _common(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and highest query, key and lag that could be in both slices, `(3, N)` each."""
    begin_q, end_q, begin_k, end_k, left, right = first.T
    others = second.T
    lowest_q, highest_q = np.maximum(begin_q, others[0]), np.minimum(end_q, others[1]) - 1
    lowest_k, highest_k = np.maximum(begin_k, others[2]), np.minimum(end_k, others[3]) - 1
    # All lags between those of two corners are in a rectangle.
    lowest_lag = np.maximum(np.maximum(-right, -others[5]), lowest_q - highest_k)
    highest_lag = np.minimum(np.minimum(left, others[4]), highest_q - lowest_k)
    return (
        np.stack([lowest_q, lowest_k, lowest_lag]),
        np.stack([highest_q, highest_k, highest_lag]),
    )


def _pair(lowest: np.ndarray, highest: np.ndarray) -> tuple[int, int]:
    """A query and a key of a rectangle that are at the lowest lag."""
    lag = int(lowest[2])
    query = max(int(lowest[0]), int(lowest[1]) + lag)
    return query, query - lag


def _near(table: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of slices that have queries, keys or lags in common, whichever are the fewest."""
    lowest, highest = _common(table, table)
    is_seen = (lowest <= highest).all(axis=0)
    table, lowest, highest = table[is_seen], lowest[:, is_seen], highest[:, is_seen]
    orders = [np.argsort(x, kind="stable") for x in lowest]
    # In order of their begins, those that a slice meets follow it, up to the first after its end.
    counts = [
        np.searchsorted(low[order], high[order], "right") - np.arange(1, len(order) + 1)
        for low, high, order in zip(lowest, highest, orders, strict=True)
    ]
    axis = int(np.argmin([x.sum() for x in counts]))
    table, count = table[orders[axis]], counts[axis]
    ends = np.cumsum(count)
    if len(ends) and ends[-1] > MAX_PAIRS:
        raise ValueError(
            f"slices must be disjoint, and {len(table):,} of them have queries, keys and lags in "
            f"common in {ends[-1]:,} ways, of which {MAX_PAIRS:,} can be looked at; larger slices "
            "are fewer"
        )
    begin = 0
    while begin < len(table):
        # As many as fit, and at least one.
        so_far = ends[begin] - count[begin]
        end = max(begin + 1, int(np.searchsorted(ends, so_far + CHUNK, "right")))
        first, number = numbered(count[begin:end])
        yield table[begin + first], table[begin + first + 1 + number]
        begin = end
