"""The queries of a shard, cut by the slices that they are in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.layouts.run import Run
from dtensor_ring.planning.masks.tables import UNBOUNDED
from dtensor_ring.planning.values.span import Span, length


class Piece(NamedTuple):
    """Queries of one run in one slice.

    Attributes:
        row: where in its shard the run begins.
        run: whose queries these are.
        span: indices of the queries in the run.
        keys: positions from the first to the last key that one of them may see.
        left: how far back a query sees, `None` if nothing in the slice is too far.
        right: how far ahead, likewise.
    """

    row: int
    run: Run
    span: Span
    keys: Span
    left: int | None
    right: int | None


def pieces_of(runs: Sequence[Run], table: np.ndarray) -> list[Piece]:
    """The pieces of a shard in the slices of one batch row, those without queries left out."""
    row, pieces = 0, []
    # No slice before the first that ends late enough has queries of a run, and none after it does
    # whose queries begin after those of the run.
    latest = np.maximum.accumulate(table[:, 1]) if len(table) else table[:, 1]
    for run in runs:
        first = np.searchsorted(latest, run.start, "right")
        end = np.searchsorted(table[:, 0], run.last, "right")
        near = table[first:end]
        # A long slice keeps all those behind it in this range.
        pieces += _cut(row, run, near[near[:, 1] > run.start])
        row += run.length
    return pieces


def _cut(row: int, run: Run, table: np.ndarray) -> Iterator[Piece]:
    for q_begin, q_end, k_begin, k_end, left, right in table.tolist():
        span = run.indices(q_begin, q_end)
        if not length(span):
            continue
        first, last = run.position(span[0]), run.position(span[1] - 1)
        # A bound that no pair reaches is none: kernels have one case less to look at.
        behind = None if left == UNBOUNDED or left >= last - k_begin else left
        ahead = None if right == UNBOUNDED or right >= k_end - 1 - first else right
        begin = k_begin if behind is None else max(k_begin, first - behind)
        end = k_end if ahead is None else min(k_end, last + ahead + 1)
        if begin < end:
            yield Piece(row, run, span, (begin, end), behind, ahead)
