"""Rows that each rank has made, on all ranks, and their gradients on the rank that made them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck

from dtensor_ring import RingError
from dtensor_ring.ops.axis_ops import gather_rows_op, sum_ranks_op, sum_rows_op
from tests.pool import Pool, on_ranks

WIDTH = 3


def place() -> tuple[int, str]:
    return dist.get_rank(), dist.group.WORLD.group_name


def both_ways(rows: list[int]) -> list[float]:
    """Errors of a gather, of its gradient, and of the gradient of that."""
    torch.manual_seed(0)
    parts = [torch.randn(n, WIDTH, dtype=torch.float64) for n in rows]
    weights = torch.randn(len(rows), sum(rows), WIDTH, dtype=torch.float64)
    rank, name = place()
    own = parts[rank].clone().requires_grad_()
    whole = gather_rows_op(own, rows, rank, name)
    (grad,) = torch.autograd.grad((whole * weights[rank]).sum(), own)
    summed = weights[rank].clone().requires_grad_()
    back = sum_rows_op(summed, rows, rank, name)
    (of_sum,) = torch.autograd.grad((back * own.detach()).sum(), summed)
    expected = weights.sum(0).split(rows)[rank]
    pairs: list[tuple[Tensor, Tensor]] = [
        *((whole, torch.cat(parts)), (grad, expected), (back, expected)),
        (of_sum, torch.cat(parts)),
    ]
    return [0.0 if x.shape == y.shape and torch.allclose(x, y) else 1.0 for x, y in pairs]


@pytest.mark.parametrize("rows", [[4], [1, 2], [3, 0], [0, 0], [2, 0, 5], [1, 3, 0, 2]])
def test_equals_one_process(pool: Pool, rows: list[int]) -> None:
    for errors in pool.run(len(rows), both_ways, rows):
        assert errors == [0.0] * 4


@pytest.mark.parametrize("what", ["rows", "width"])
@on_ranks(2)
def test_ranks_that_differ_are_reported(what: str) -> None:
    rank, name = place()
    rows = [2, 1 + rank] if what == "rows" else [2, 1]
    width = WIDTH + rank if what == "width" else WIDTH
    with pytest.raises(RingError, match=f"differ in {what}"):
        gather_rows_op(torch.zeros(rows[rank], width), rows, rank, name)


@on_ranks(2)
def test_a_part_that_is_too_short_is_reported_to_all() -> None:
    rank, name = place()
    message = "a part of 1 rows came where 2 were announced"
    with pytest.raises((ValueError, RingError), match=message):
        gather_rows_op(torch.zeros(2 - rank, WIDTH), [2, 2], rank, name)


@on_ranks(1)
def test_ops() -> None:
    # opcheck looks at .grad of copies that are no leaves, whatever it is given.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    x = torch.randn(2, WIDTH, requires_grad=True)
    opcheck(gather_rows_op, (x, [2], *place()))
    opcheck(sum_rows_op, (x, [2], *place()))
    for given in (x, x.detach(), x.sum(), torch.ones(3, dtype=torch.int32)):
        opcheck(sum_ranks_op, (given, dist.group.WORLD.group_name))


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (3,), (0, 2), (2, 20_000)]
"""The last one is larger than what may follow a record in its message."""


def sums(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """A sum of a tensor that is not contiguous, and its gradient; both next to dense sums."""
    size, (rank, name) = dist.get_world_size(), place()
    torch.manual_seed(0)
    parts = [torch.randn(shape).mT if len(shape) > 1 else torch.randn(shape) for _ in range(size)]
    weights = torch.randn(size, *parts[0].shape)
    own = parts[rank].to(dtype, copy=True).requires_grad_()
    weight = weights[rank].to(dtype).requires_grad_()
    total = sum_ranks_op(own, name)
    (grad,) = torch.autograd.grad(total, own, weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), weight)
    exact = [sum(x.to(dtype).double() for x in each) for each in (parts, weights)]
    for found, expected in zip((total, grad), exact, strict=True):
        torch.testing.assert_close(found.detach(), expected.to(dtype))
    assert torch.equal(second, torch.full_like(second, size))
    return [total.detach(), grad.detach()]


def all_sums(dtype: torch.dtype) -> list[Tensor]:
    return [x for shape in SHAPES for x in sums(shape, dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sum_over_ranks(pool: Pool, world_size: int, dtype: torch.dtype) -> None:
    first, *others = pool.run(world_size, all_sums, dtype)
    assert all(torch.equal(x, y) for found in others for x, y in zip(first, found, strict=True))


@on_ranks(3)
def test_sum_over_ranks_of_other_dtypes() -> None:
    rank, name = place()
    for dtype, expected in ((torch.bool, torch.int64), (torch.int32, torch.int64)):
        total = sum_ranks_op(torch.tensor([True, rank > 0]).to(dtype), name)
        assert (total.dtype, total.tolist()) == (expected, [3, 2])
    local = torch.tensor([1 + 2j]).mul(rank).conj()
    assert sum_ranks_op(local, name).tolist() == [3 - 6j]


class Select(torch.autograd.Function):
    """The sum of two tensors, of which the first one may have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, is_used: bool) -> Tensor:
        ctx.is_used = is_used
        return x + other

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        return grads[0] if ctx.is_used else None, grads[0], None


@on_ranks(2)
def test_unused_gradient_of_a_sum() -> None:
    """A rank that did not use a sum takes part in the backward of the others."""
    rank, name = place()
    local = torch.ones(2, requires_grad=True)
    total, other = sum_ranks_op(local, name), torch.zeros(2, requires_grad=True)
    Select.apply(total, other, rank == 0).sum().backward()
    assert local.grad.tolist() == [1.0, 1.0]
