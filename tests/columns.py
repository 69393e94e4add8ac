"""Columns one by one."""

from __future__ import annotations

from collections.abc import Iterable

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.ranges import Span


def cols_of(indices: Iterable[int]) -> Cols:
    """These columns."""
    spans: list[Span] = []
    for i in sorted(set(indices)):
        spans.append((spans.pop()[0] if spans and spans[-1][1] == i else i, i + 1))
    return Cols(tuple(spans))


def indices_of(cols: Cols) -> list[int]:
    """The columns one by one."""
    return [i for span in cols.spans for i in range(*span)]


def union(many: Iterable[Cols]) -> Cols:
    """The columns of any of them."""
    return cols_of(i for cols in many for i in indices_of(cols))
