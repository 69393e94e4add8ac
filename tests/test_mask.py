"""The band of lags: what its names mean, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring import Mask
from tests.dense import visible

bounds = st.none() | st.integers(0, 9)


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
    ],
)
def test_named_masks(mask: Mask, seen_by_4: list[int]) -> None:
    assert [key for key in range(8) if mask.sees(4, key)] == seen_by_4


@given(left=bounds, right=bounds)
def test_sees_what_the_dense_mask_shows(left: int | None, right: int | None) -> None:
    mask = Mask.local(left, right)
    seen = [[mask.sees(query, key) for key in range(10)] for query in range(10)]
    assert torch.equal(torch.tensor(seen), visible(mask, (10, 10), 1)[0, 0])


def test_masks_are_values() -> None:
    assert Mask(None, 0) == Mask.causal() == Mask.local(None, 0)
    assert hash(Mask.sliding(5)) == hash(Mask(5, 0))
    assert Mask.full() != Mask.causal()


@pytest.mark.parametrize(
    ("left", "right", "error", "message"),
    [
        (-1, 0, ValueError, "Mask left counts tokens and is at least 0, got -1; None means"),
        (None, -2, ValueError, "Mask right counts tokens and is at least 0, got -2; None means"),
        (1.5, 0, TypeError, "Mask left is an int or None, got float"),
        (None, True, TypeError, "Mask right is an int or None, got bool"),
    ],
)
def test_bad_bounds(left: object, right: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mask(left, right)  # type: ignore[arg-type]
