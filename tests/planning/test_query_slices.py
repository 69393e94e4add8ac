"""Queries cut by slices, against every pair written out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring.planning.layout import Run
from dtensor_ring.planning.slices import UNBOUNDED, Slices
from dtensor_ring.planning.tile import query_slices_of
from tests.drawn import examples
from tests.slices import shown, tables

SEQ_LEN = 24
runs = st.builds(Run, st.integers(0, 9), st.integers(1, 5), st.integers(1, 3))


@settings(deadline=None, max_examples=examples(300))
@given(runs, tables((SEQ_LEN, SEQ_LEN)))
def test_query_slices_show_what_slices_show(run: Run, table: np.ndarray) -> None:
    ordered = Slices.of_tables([table]).tables[0]
    found = np.zeros((SEQ_LEN, SEQ_LEN), dtype=np.int64)
    for query_slice in query_slices_of([run], ordered):
        assert query_slice.row == 0
        assert query_slice.run == run
        for index in range(*query_slice.span):
            query = run.position(index)
            bounds = (UNBOUNDED if x is None else x for x in (query_slice.left, query_slice.right))
            row = np.array([(query, query + 1, *query_slice.keys, *bounds)])
            found += shown(row, (SEQ_LEN, SEQ_LEN))
    expected = np.zeros_like(found)
    positions = [run.position(index) for index in range(run.length)]
    expected[positions] = shown(table, (SEQ_LEN, SEQ_LEN))[positions]
    assert np.array_equal(found, expected)
