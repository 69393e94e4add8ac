"""Functions whose bits depend on their arguments alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtensor_ring.compute.exact import exact_exp, exact_log, tree_sum


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
