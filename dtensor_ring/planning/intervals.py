"""Slices of queries that see a few ranges of keys each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from dtensor_ring.planning.slices import UNBOUNDED, Slices


def slices_of_intervals(begins: Any, ends: Any) -> Slices:
    """Slices that show each query the keys from a begin to an end, or from several.

    Neighbours share a slice as long as both ends of their ranges stand still or go on by one.

    Args:
        begins: first key of each query, integers `(S,)`, by batch row `(B, S)`, or of R disjoint
            ranges `(B, S, R)`.
        ends: one after its last key; not after the begin where a range is empty.

    >>> # Causal, but tokens 1 to 3 see one another both ways.
    >>> slices_of_intervals([0, 0, 0, 0, 0], [1, 4, 4, 4, 5]).tables[0][:, :4].tolist()
    [[0, 1, 0, 1], [1, 4, 0, 4], [4, 5, 0, 5]]
    """
    first, after = (np.atleast_2d(np.asarray(x)).astype(np.int64) for x in (begins, ends))
    if first.ndim == 2:
        first, after = first[..., None], after[..., None]
    return Slices.of_tables(
        [
            # Range number r of a query goes on in that of the next.
            [part for columns in zip(*row, strict=True) for part in _slices(*columns)]
            for row in zip(first.swapaxes(1, 2), after.swapaxes(1, 2), strict=True)
        ]
    )


def _slices(begins: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, ...]]:
    """The slices of one batch row."""
    for first, after in _groups(begins, ends):
        last = after - 1
        # An end that moves is a bound of the band, one that stands still an end of the keys.
        left = first - begins[first] if begins[last] > begins[first] else UNBOUNDED
        right = ends[last] - 1 - last if ends[last] > ends[first] else UNBOUNDED
        yield first, after, int(begins[first]), int(ends[last]), int(left), int(right)


def _groups(begins: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """First query of each group, and one after the last: ranges change alike within a group."""
    moves = np.stack([np.diff(begins), np.diff(ends)], axis=1)
    is_new = np.append(True, (moves[1:] != moves[:-1]).any(1)) if len(moves) else moves[:, 0] > 0
    start = 0
    # Change number i leads from query i to the next.
    for first, after in pairwise([*np.flatnonzero(is_new).tolist(), len(moves)]):
        if not np.isin(moves[first], (0, 1)).all():
            for query in range(first + 1, after + 1):  # each jumps
                yield start, query
                start = query
        elif start < first:  # a group of other changes ends here; a single query has none yet
            yield start, first + 1
            start = first + 1
    if len(begins):
        yield start, len(begins)
