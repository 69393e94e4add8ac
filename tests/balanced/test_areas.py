"""Closed forms against pairs that are counted one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring.balanced.work import areas, exact_table, visible_pairs
from dtensor_ring.planning.slices import UNBOUNDED, Slices
from tests.slices import shown, slices

SIZES = (12, 15)
"""Queries and keys."""


@given(st.data(), st.integers(0, 3))
def test_pairs_are_those_that_are_shown(data: st.DataObject, num_rows: int) -> None:
    given_slices = data.draw(slices(SIZES, num_rows))
    begin, end = sorted(data.draw(st.tuples(st.integers(0, 14), st.integers(0, 14))))
    expected = sum(int(shown(table, SIZES)[begin:end].sum()) for table in given_slices)
    assert visible_pairs(given_slices, (begin, end)) == expected


@given(st.data())
def test_each_slice_has_a_range_of_its_own(data: st.DataObject) -> None:
    table = data.draw(slices(SIZES, 1)).tables[0]
    ends = st.lists(st.integers(0, 14), min_size=len(table), max_size=len(table))
    begins, ends = (np.array(data.draw(ends), dtype=np.int64) for _ in range(2))
    found = areas(table, begins, ends)
    for row, begin, end, area in zip(table, begins, ends, found, strict=True):
        assert area == shown(row[None], SIZES)[begin:end].sum(), "none if the range is empty"


@pytest.mark.parametrize("bits", [20, 28, 29, 30, 31, 40])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_no_square_overflows(bits: int, num_rows: int) -> None:
    n = 2**bits
    causal = Slices.of_tables([[[0, n, 0, n, UNBOUNDED, 0]]] * num_rows)
    full = Slices.of_tables([[[0, n, 0, n, UNBOUNDED, UNBOUNDED]]] * num_rows)
    assert visible_pairs(causal, (0, n)) == num_rows * n * (n + 1) // 2
    assert visible_pairs(full, (5, 2**40 + 5)) == num_rows * n * (n - 5)
    assert exact_table(causal).dtype == (object if bits > 28 else np.int64)
