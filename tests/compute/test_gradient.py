"""Sums of gradients: exact, float32 while they grow, and rounded once."""

from __future__ import annotations

import pytest
import torch

from dtensor_ring.compute.accumulate import GradientSum, Partials
from dtensor_ring.compute.merge import accumulate_sums
from dtensor_ring.planning.demand import Cols

ALL = (slice(None), slice(None), slice(None))
SOME = (slice(0, 1), slice(None), slice(1, 3))


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "regions", [[], [ALL], [SOME], [ALL, SOME], [SOME, ALL, SOME]], ids=lambda r: str(len(r))
)
@pytest.mark.parametrize("num_homes", [0, 1, 3])
@pytest.mark.parametrize("room", [None, 1, 3])
def test_gradient_sum(
    dtype: torch.dtype, regions: list[tuple[slice, ...]], num_homes: int, room: int | None
) -> None:
    torch.manual_seed(0)
    like = torch.empty(2, 3, 4, 5, dtype=dtype)
    total, expected = GradientSum(like, room), torch.zeros(like.shape, dtype=torch.float64)
    for region in regions:
        grad = torch.randn(like[region].shape).to(dtype)
        expected[region] += grad
        total.add(region, grad)
    for left in reversed(range(num_homes)):
        arrived = torch.randn(2, 3, 2, 5, dtype=torch.promote_types(dtype, torch.float32))
        expected[:, :, 1:3] += arrived
        total.add_arrived(arrived, Cols(((1, 3),)), is_last=not left)
    result = total.result()
    assert result.dtype == dtype
    assert result.transpose(1, 2).is_contiguous(), "token-major"
    # float32 accumulates, and one rounding to the dtype is at the end.
    rtol = torch.finfo(dtype).eps / 2 + 1e-6 if dtype != torch.float64 else 1e-15
    torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(
    "regions", [[], [ALL], [SOME], [SOME, SOME], [SOME, ALL], [ALL] * 3], ids=lambda r: str(len(r))
)
def test_gradient_share(first: bool, regions: list[tuple[slice, ...]]) -> None:
    total = torch.randn(2, 2, 3, 4)
    step = Partials(torch.empty(total.shape, dtype=torch.bfloat16), room=1)
    expected = torch.zeros_like(total) if first else total.clone()
    for region in regions:
        grad = torch.randn(total[region].shape).bfloat16()
        expected[region] += grad
        step.add(region, grad)
    accumulate_sums(step.into(total, first))
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
