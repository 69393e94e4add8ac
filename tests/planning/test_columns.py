"""Columns as spans, against columns one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.ranges import Span, length, moved
from tests.columns import cols_of, indices_of

spans = st.tuples(st.integers(0, 30), st.integers(0, 5)).map(lambda x: (x[0], x[0] + x[1]))


@given(st.lists(spans))
def test_columns(some: list[Span]) -> None:
    indices = [i for span in some for i in range(*span)]
    cols = Cols.union(some)
    assert cols == cols_of(indices)
    assert hash(cols) == hash(cols_of(indices))
    assert len(cols) == len(set(indices))
    held = indices_of(cols)
    for span in some:
        if length(span):
            assert held[slice(*cols.packed(span))] == list(range(*span))


@given(st.lists(spans))
def test_spans(some: list[Span]) -> None:
    assert [length(span) for span in some] == [len(range(*span)) for span in some]
    assert all(list(range(*moved(x, 3))) == [i + 3 for i in range(*x)] for x in some)
