"""Orders of dimensions in memory, against torch's own strides."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from dtensor_ring.compute.memory import TOKEN_MAJOR, Order, empty, in_order, order_of, strides

SHAPE = 2, 3, 5, 4
ORDERS = [(*order, 3) for order in permutations(range(3))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_is_kept(order: Order, dtype: torch.dtype) -> None:
    x = torch.randn(SHAPE).bfloat16()
    result = in_order(x, order, dtype)
    assert (result.dtype, order_of(result)) == (dtype, order)
    assert torch.equal(result, x.to(dtype))
    assert result.stride() == strides(SHAPE, order)
    assert in_order(result, order, dtype).data_ptr() == result.data_ptr(), "no copy"
    for made in (empty(result, SHAPE, order), empty(x, SHAPE, order, dtype)):
        assert (made.shape, made.stride(), made.dtype) == (SHAPE, result.stride(), dtype)


def test_names() -> None:
    projected = torch.randn(2, 5, 3, 4).transpose(1, 2)
    assert order_of(projected) == TOKEN_MAJOR
    assert order_of(torch.randn(SHAPE)) == (0, 1, 2, 3)
    assert order_of(torch.randn(SHAPE)[:, :, ::2]) == (0, 1, 2, 3), "gaps do not matter"
    assert order_of(torch.randn(2, 3, 5)) == (0, 1, 2), "lse"
