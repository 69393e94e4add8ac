"""Slices that have a pair in common, against all pairs written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Mask, Slices
from dtensor_ring.planning import slices as overlap
from dtensor_ring.planning.slice_tables import UNBOUNDED
from dtensor_ring.planning.slices import find_overlap
from tests.drawn import examples
from tests.slices import shown

SEQ_LENS = 9, 12
RANGES = [st.tuples(*[st.integers(0, x)] * 2).map(sorted) for x in SEQ_LENS]
BOUNDS = st.just(UNBOUNDED) | st.integers(-12, 12)
ROWS = st.tuples(*RANGES, BOUNDS, BOUNDS).map(lambda x: (*x[0], *x[1], *x[2:]))


@settings(deadline=None, max_examples=examples(400))
@given(st.lists(ROWS, max_size=6), st.integers(1, 4))
def test_overlaps_are_found(rows: list[tuple[int, ...]], chunk: int) -> None:
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "CHUNK", chunk)
        found = find_overlap(table)
    if found is None:
        assert shown(table, SEQ_LENS).max(initial=0) <= 1
        return
    for row in (found.first, found.second):
        assert row in rows
        assert shown(np.array([row]), SEQ_LENS)[found.query, found.key] == 1
    assert found.first != found.second or rows.count(found.first) > 1


STAIRS = [(8 * i, 8 * i + 8) for i in range(256)]
LARGE = {
    # By queries, by keys and by lags: each of these is easy in one way only.
    "documents": Slices.documents(range(0, 80008, 8), Mask.causal()),
    "rows": Slices(STAIRS, [(0, 2048)] * 256, [(None, None)] * 256),
    "columns": Slices([(0, 2048)] * 256, STAIRS, [(None, None)] * 256),
    "diagonals": Slices(
        [(0, 2048)] * 256, [(0, 2048)] * 256, [(3 * i, -3 * i) for i in range(256)]
    ),
    "squares": Slices.of_tables(
        [[(*q, *k, UNBOUNDED, UNBOUNDED) for q in STAIRS[:64] for k in STAIRS[:64]]]
    ),
}


@pytest.mark.parametrize("slices", LARGE.values(), ids=list(LARGE))
def test_few_pairs_of_slices_are_compared(slices: Slices, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is bounded by the neighbours in one direction, not by all pairs."""
    (table,) = slices.tables
    monkeypatch.setattr(overlap, "MAX_PAIRS", 64 * len(table))
    assert find_overlap(table) is None
    more = np.append(table, table[-1:] + np.array([0, 1, 0, 1, 0, 0]), axis=0)
    assert find_overlap(more) is not None


def test_slices_that_are_everywhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MAX_PAIRS", 100)
    message = r"4,096 of them .* in common in \d+,\d+ ways, of which 100 can be looked at"
    with pytest.raises(ValueError, match=message):
        find_overlap(LARGE["squares"].tables[0])
