"""Rows that each rank has made, on all ranks, and their gradients on the rank that made them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck

from dtensor_ring import RingError
from dtensor_ring.ops.parts import gather_parts_op, sum_parts_op
from tests.pool import Pool

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
    whole = gather_parts_op(own, rows, rank, name)
    (grad,) = torch.autograd.grad((whole * weights[rank]).sum(), own)
    summed = weights[rank].clone().requires_grad_()
    back = sum_parts_op(summed, rows, rank, name)
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


def differing(what: str) -> str:
    rank, name = place()
    rows = [2, 1 + rank] if what == "rows" else [2, 1]
    width = WIDTH + rank if what == "width" else WIDTH
    with pytest.raises(RingError) as error:
        gather_parts_op(torch.zeros(rows[rank], width), rows, rank, name)
    return str(error.value)


@pytest.mark.parametrize("what", ["rows", "width"])
def test_ranks_that_differ_are_told(pool: Pool, what: str) -> None:
    for text in pool.run(2, differing, what):
        assert f"differ in {what}" in text


def short() -> str:
    rank, name = place()
    with pytest.raises((ValueError, RingError)) as error:
        gather_parts_op(torch.zeros(2 - rank, WIDTH), [2, 2], rank, name)
    return str(error.value)


def test_a_part_that_is_too_short_is_told_to_all(pool: Pool) -> None:
    for text in pool.run(2, short):
        assert "a part of 1 rows came where 2 were announced" in text


def check_ops() -> None:
    # opcheck looks at .grad of copies that are no leaves, whatever it is given.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    x = torch.randn(2, WIDTH, requires_grad=True)
    opcheck(gather_parts_op, (x, [2], *place()))
    opcheck(sum_parts_op, (x, [2], *place()))


def test_ops(pool: Pool) -> None:
    pool.run(1, check_ops)
