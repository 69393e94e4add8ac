"""Gradients of shards and sinks, and functions whose bits depend on arguments alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.accumulate import GradientSum, Partials, add_sinks, sinks_gradient
from dtensor_ring.compute.exact import exact_exp, exact_log, tree_sum
from dtensor_ring.compute.kernels import Saved
from dtensor_ring.compute.merge import accumulate_sums
from dtensor_ring.planning.demand import Cols
from tests.dense import dense_attention

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


# Sinks, forward and backward, against dense attention with one more column of scores.

SINKS = torch.tensor([0.5, -1.0, -torch.inf])


def inputs() -> list[Tensor]:
    """Query, key, value, gradient of out and gradient of lse."""
    torch.manual_seed(0)
    return [torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 7, 7, 5)] + [
        torch.randn(2, 3, 5, dtype=torch.float64)
    ]


@pytest.mark.parametrize("with_lse", [False, True], ids=["", "gradient of lse"])
def test_like_dense(with_lse: bool) -> None:
    query, key, value, grad_out, grad_lse = inputs()
    without = dense_attention(query, key, value, Mask.full())
    out = without.out.detach().clone()
    lse = add_sinks(out, without.lse.detach(), SINKS)
    expected = dense_attention(query, key, value, Mask.full(), sinks=SINKS)
    torch.testing.assert_close(out, expected.out.detach())
    torch.testing.assert_close(lse, expected.lse.detach())
    slope = grad_lse if with_lse else None
    *_, grad_sinks = expected.backward(grad_out, slope)
    found = sinks_gradient(Saved(grad_out, out, lse, slope), SINKS)
    torch.testing.assert_close(found.double(), grad_sinks, rtol=1e-6, atol=1e-6)
    assert found.dtype == SINKS.dtype


def test_rows_that_see_nothing() -> None:
    out, lse = torch.zeros(1, 3, 2, 4), torch.full((1, 3, 2), -torch.inf)
    with_sinks = add_sinks(out, lse, SINKS)
    assert out.eq(0).all()
    assert torch.equal(with_sinks, SINKS.view(1, 3, 1).expand(1, 3, 2))
    grad_out = torch.ones(1, 3, 2, 4)
    assert sinks_gradient(Saved(grad_out, out, with_sinks), SINKS).eq(0).all()


def test_no_sinks_have_no_gradient() -> None:
    out = torch.zeros(1, 3, 2, 4, dtype=torch.bfloat16)
    found = sinks_gradient(Saved(out, out, torch.zeros(1, 3, 2)), None)
    assert (found.numel(), found.dtype) == (0, torch.bfloat16)


# Functions whose bits depend on their arguments alone.


def test_they_are_right() -> None:
    x = -torch.logspace(-12, 2.8, 5000, dtype=torch.float64)
    torch.testing.assert_close(exact_exp(x), x.exp(), rtol=1e-15, atol=0.0)
    x = torch.logspace(0, 200, 5000, dtype=torch.float64)
    torch.testing.assert_close(exact_log(x), x.log(), rtol=1e-15, atol=1e-16)
    x = torch.randn(3, 37, 5, dtype=torch.float64)
    torch.testing.assert_close(tree_sum(x, 1), x.sum(1))
    assert tree_sum(x[:, :0], 1).eq(0.0).all()


def test_their_limits() -> None:
    special = torch.tensor([0.0, -torch.inf, -1e30, torch.nan])
    assert exact_exp(special)[:3].tolist() == [1.0, 0.0, 0.0]
    assert exact_exp(special)[3].isnan()
    assert exact_log(torch.tensor([1.0])).item() == 0.0


@pytest.mark.parametrize("function", [exact_exp, lambda x: exact_log(1.0 - x)])
def test_bits_do_not_depend_on_neighbours(function: object) -> None:
    x = -30.0 * torch.rand(1000, generator=torch.Generator().manual_seed(0))
    whole: Tensor = function(x)  # type: ignore[operator]
    for begin, end in ((0, 1), (1, 18), (7, 999), (500, 513)):
        assert torch.equal(function(x[begin:end]), whole[begin:end])  # type: ignore[operator]


def test_a_sum_does_not_depend_on_what_is_beside_it() -> None:
    x = torch.randn(7, 45, 6)
    whole = tree_sum(x, 1)
    for row in range(7):
        assert torch.equal(tree_sum(x[row : row + 1, :, 2:3], 1), whole[row : row + 1, 2:3])
