"""Work of ranges of queries, units, and cuts into parts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring.balanced.work import AttentionWork
from dtensor_ring.planning.slices import UNBOUNDED, Slices
from tests.slices import shown, slices

SEQ_LEN = 16


def counted(given: Slices) -> np.ndarray:
    """Pairs that each query sees, over all rows."""
    zeros = np.zeros(SEQ_LEN, dtype=np.int64)
    return sum((shown(table, (SEQ_LEN, SEQ_LEN)).sum(1) for table in given), zeros)


@given(st.data())
def test_areas_of_ranges(data: st.DataObject) -> None:
    found = data.draw(slices((SEQ_LEN, SEQ_LEN), data.draw(st.integers(0, 3))))
    edges = np.array(sorted(data.draw(st.lists(st.integers(0, SEQ_LEN), min_size=2))))
    work, queries = AttentionWork(found), counted(found)
    expected = [queries[begin:end].sum() for begin, end in pairwise(edges)]
    assert work.areas(edges[:-1], edges[1:]).tolist() == expected
    assert work.total == queries.sum()


@given(st.data())
def test_units_see_nothing_of_one_another(data: st.DataObject) -> None:
    found = data.draw(slices((SEQ_LEN, SEQ_LEN), data.draw(st.integers(0, 2))))
    units = AttentionWork(found).units(SEQ_LEN, data.draw(st.integers(1, 6)))
    assert [0, *units.ends] == [*units.begins, SEQ_LEN]
    queries = counted(found)
    numbers = np.repeat(np.arange(len(units.ends)), units.ends - units.begins)
    assert units.areas.tolist() == [queries[numbers == n].sum() for n in range(len(units.ends))]
    for table in found:
        query, key = np.nonzero(shown(table, (SEQ_LEN, SEQ_LEN)))
        assert (numbers[query] == numbers[key]).all()


def documents(*ends: int) -> Slices:
    """Causal ones."""
    bounds = [0, *ends]
    return Slices.of_tables([[(a, b, a, b, UNBOUNDED, 0) for a, b in pairwise(bounds)]])


UNITS = {
    "documents": (documents(5, 7, 16), 1, [5, 7, 16]),
    "short ones that begin in one block": (documents(5, 6, 7, 8, 9, 16), 4, [5, 8, 9, 16]),
    "what no slice covers": (documents(5, 7), 1, [5, 7, 16]),
    "a window that reaches less far than its slice": (
        Slices([(8, 12)], [(0, 12)], [(2, 0)]), 1, [6, 12, 16],
    ),
    "rows that differ": (
        Slices.of_tables([*documents(4, 16), *documents(8)]), 1, [16],
    ),
    "nothing": (Slices.of_tables([[]]), 1, [16]),
}  # fmt: skip


@pytest.mark.parametrize(("given_slices", "block", "ends"), UNITS.values(), ids=list(UNITS))
def test_units(given_slices: Slices, block: int, ends: list[int]) -> None:
    assert AttentionWork(given_slices).units(SEQ_LEN, block).ends.tolist() == ends


@given(st.data())
def test_parts_have_equal_areas(data: st.DataObject) -> None:
    found = data.draw(slices((SEQ_LEN, SEQ_LEN), 1))
    work = AttentionWork(found)
    units = work.units(SEQ_LEN, 1)
    num_parts = np.array([data.draw(st.integers(1, 4)) for _ in units.ends])
    queries = counted(found)
    rows = zip(units.begins, units.ends, units.areas, work.cuts(units, num_parts), strict=True)
    for begin, end, area, edges in rows:
        assert (edges[0], edges[-1]) == (begin, end)
        for part, edge in enumerate(edges[1:-1], 1):
            goal = area * part // (len(edges) - 1)
            assert queries[begin:edge].sum() >= goal, "enough"
            assert edge == begin or queries[begin : edge - 1].sum() < goal, "and no token more"
