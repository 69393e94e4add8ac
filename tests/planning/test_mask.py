"""Masks: what their names mean, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring import Mask
from tests.dense import visible


def masks(bounds: st.SearchStrategy[int]) -> st.SearchStrategy[Mask]:
    """Bands, some of them in chunks, others with a prefix."""
    band = {"left": st.none() | bounds, "right": st.sampled_from([0, None]) | bounds}
    chunk, prefix = bounds.map(lambda n: n + 1), bounds
    plain, chunked, prefixed = (
        st.builds(Mask, **band, **more) for more in ({}, {"chunk": chunk}, {"prefix": prefix})
    )
    return plain | chunked | prefixed


@pytest.mark.parametrize(
    ("mask", "seen_by_4"),
    [
        (Mask.full(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Mask.causal(), [0, 1, 2, 3, 4]),
        (Mask.sliding(0), [4]),
        (Mask.sliding(2), [2, 3, 4]),
        (Mask.local(1, 2), [3, 4, 5, 6]),
        (Mask.local(None, 1), [0, 1, 2, 3, 4, 5]),
        (Mask.local(3, None), [1, 2, 3, 4, 5, 6, 7]),
        (Mask.chunked(3), [3, 4]),
        (Mask.chunked(4), [4]),
        (Mask(None, None, chunk=3), [3, 4, 5]),
        (Mask(3, 0, chunk=4), [4]),
        (Mask(1, 0, chunk=5), [3, 4]),
        (Mask.prefix_causal(0), [0, 1, 2, 3, 4]),
        (Mask.prefix_causal(3), [0, 1, 2, 3, 4]),
        (Mask.prefix_causal(6), [0, 1, 2, 3, 4, 5]),
        (Mask(2, 0, prefix=6), [2, 3, 4, 5]),
    ],
)
def test_named_masks(mask: Mask, seen_by_4: list[int]) -> None:
    assert [key for key in range(8) if mask.sees(4, key)] == seen_by_4


@given(masks(st.integers(0, 9)))
def test_sees_what_the_dense_mask_shows(mask: Mask) -> None:
    seen = [[mask.sees(query, key) for key in range(10)] for query in range(10)]
    assert torch.equal(torch.tensor(seen), visible(mask, (10, 10), 1)[0, 0])


def test_masks_are_values() -> None:
    assert Mask(None, 0) == Mask.causal() == Mask.local(None, 0)
    assert hash(Mask.sliding(5)) == hash(Mask(5, 0))
    assert Mask.full() != Mask.causal() != Mask.chunked(4) != Mask.prefix_causal(4)
    assert Mask.chunked(4) == Mask(None, 0, chunk=4)
    assert Mask.prefix_causal(4) == Mask(None, 0, prefix=4)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"left": -1}, ValueError, "left counts tokens and is at least 0, got -1; None means"),
        ({"right": -2}, ValueError, "right counts tokens and is at least 0, got -2; None means"),
        ({"chunk": 0}, ValueError, "chunk counts tokens and is at least 1, got 0; None means"),
        ({"prefix": -1}, ValueError, "prefix counts tokens and is at least 0, got -1; None means"),
        (
            {"left": 2**63},
            ValueError,
            r"Mask left counts tokens and is at most 2\*\*63 - 1, got 922",
        ),
        ({"left": 1.5}, TypeError, "Mask left is an int or None, got float"),
        ({"right": True}, TypeError, "Mask right is an int or None, got bool"),
        ({"chunk": "4"}, TypeError, "Mask chunk is an int or None, got str"),
        ({"prefix": 2.0}, TypeError, "Mask prefix is an int or None, got float"),
        (
            {"chunk": 4, "prefix": 0},
            ValueError,
            r"a mask has chunks or a prefix, not both, got Mask\(left=None, right=0, chunk=4, pref",
        ),
    ],
)
def test_bad_bounds(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mask(**{"left": None, "right": 0, **wrong})
