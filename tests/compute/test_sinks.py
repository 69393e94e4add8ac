"""Sinks, forward and backward, against dense attention with one more column of scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.accumulate import add_sinks, sinks_gradient
from dtensor_ring.compute.kernels import Saved
from tests.dense import dense_attention

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
