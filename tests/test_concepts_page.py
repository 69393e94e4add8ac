"""The picture of docs/concepts.md is drawn from plans, and shows all pairs that count."""

from __future__ import annotations

import numpy as np
import pytest

from docs.plans import EXAMPLES, PICTURE, SEQ_LEN, computed, picture
from dtensor_ring import Slices
from tests.slices import shown
from tests.test_public import ROOT


def test_the_picture_is_that_of_the_plans() -> None:
    assert picture() == PICTURE.read_text(), "run python -m docs.plans --write"
    assert f"({PICTURE.name})" in (ROOT / "docs" / "concepts.md").read_text()


@pytest.mark.parametrize("title", EXAMPLES)
def test_what_is_computed_is_what_counts(title: str) -> None:
    example = EXAMPLES[title]
    bounds = example.cu_seqlens or [0, SEQ_LEN]
    expected = shown(Slices.documents(bounds, example.mask).tables[0], (SEQ_LEN, SEQ_LEN)) > 0
    ranks = computed(example.schedule)[..., 0]
    assert np.array_equal(ranks >= 0, expected)
    for rank, positions in enumerate(example.positions):
        is_seen = expected[positions]
        assert (ranks[positions][is_seen] == rank).all(), "a rank computes its own queries"
