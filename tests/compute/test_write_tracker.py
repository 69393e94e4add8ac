"""Memory that is filled region by region, in any order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring.compute.memory import WriteTracker, region

BATCH, TOKENS = 2, 6
SPANS = st.tuples(st.integers(0, TOKENS), st.integers(0, TOKENS)).map(sorted).map(tuple)
REGIONS = st.lists(st.builds(region, st.sampled_from([None, 0, 1]), SPANS), max_size=5)


@given(regions=REGIONS, is_full=st.booleans())
def test_fresh_memory_becomes_the_sum(regions: list, is_full: bool) -> None:
    shape = BATCH, 3, TOKENS, 4
    memory = torch.full(shape, 7.0 if is_full else torch.nan)
    expected = torch.full(shape, 7.0 if is_full else 0.0)
    filled = WriteTracker(shape, is_full)
    for at in regions:
        x = torch.randn(expected[at].shape)
        expected[at] += x
        filled.add(memory, at, x)
    filled.finish(memory)
    torch.testing.assert_close(memory, expected)


def test_what_is_new_is_not_zeroed_before() -> None:
    memory, filled = (
        torch.full((BATCH, 1, TOKENS, 1), torch.nan),
        WriteTracker((BATCH, 1, TOKENS, 1)),
    )
    assert filled.reach(memory, region(0, (1, 3)))
    assert memory.flatten(1).isnan().sum(1).tolist() == [TOKENS - 1, TOKENS], "one was skipped"
    assert not filled.reach(memory, region(None, (2, 4))), "one row holds something of it"
    assert memory.flatten(1).isnan().sum(1).tolist() == [TOKENS - 2, TOKENS - 4]
