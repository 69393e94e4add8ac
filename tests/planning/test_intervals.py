"""Slices of ranges of keys, against the ranges written out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring.planning.intervals import slices_of_intervals
from tests.slices import shown

NUM_KEYS = 12
edges = st.integers(0, NUM_KEYS)


@given(st.lists(st.lists(st.tuples(edges, edges), max_size=9), min_size=1, max_size=1))
def test_slices_show_the_ranges(rows: list[list[tuple[int, int]]]) -> None:
    ranges = np.array(rows, dtype=np.int64).reshape(len(rows), -1, 2)
    found = slices_of_intervals(ranges[..., 0], ranges[..., 1])
    for table, row in zip(found.tables, ranges.tolist(), strict=True):
        expected = [[begin <= key < end for key in range(NUM_KEYS)] for begin, end in row]
        actual = shown(table, (len(row), NUM_KEYS))
        assert np.array_equal(actual, np.array(expected, dtype=np.int64).reshape(actual.shape))


def test_several_ranges() -> None:
    begins, ends = np.array([[[0, 5], [0, 6], [1, 0]]]), np.array([[[2, 7], [3, 7], [2, 0]]])
    table = slices_of_intervals(begins, ends).tables[0]
    rows = [[1, 1, 0, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0]]
    assert shown(table, (3, 7)).tolist() == rows


def test_usual_masks_are_few_slices() -> None:
    query = np.arange(100)
    window, documents = np.maximum(query - 9, 0), query // 30 * 30
    image = np.where((query >= 40) & (query < 60), 60, query + 1)
    for begins, ends, expected in (
        (0 * query, query + 1, 1),
        (window, query + 1, 2),
        (documents, query + 1, 4),
        (0 * query, image, 3),
        (window, image, 4),
    ):
        assert len(slices_of_intervals(begins, ends).tables[0]) == expected
