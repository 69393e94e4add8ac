"""Rows and states that go along the ranks, against one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from dtensor_ring.agreement.call_record import RingError
from dtensor_ring.ops.axis_ops import (
    attached,
    gather_rows_op,
    receive_op,
    send_op,
    sum_ranks_op,
    sum_rows_op,
)
from dtensor_ring.transport.transport import ProcessGroupTransport, set_transport
from tests.lab.counted import counted
from tests.pool import Pool, on_ranks

LAYERS, ROWS, NUMBERS = 3, 2, 5


def recurrence(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Output and last state of a shard `(B, N)`, taken as one token."""
    state = torch.tanh(state * weight + x)
    return x + state * weight.sin(), state


def whole(shards: Tensor, weights: Tensor) -> Tensor:
    """All layers over all shards `(W, B, N)`, one after another."""
    for weight in weights:
        state, outs = torch.zeros_like(shards[0]), []
        for x in shards:
            out, state = recurrence(x, state, weight)
            outs.append(out)
        shards = torch.stack(outs)
    return shards


def handed_over(shard: Tensor, weights: Tensor, checkpoints: bool = False) -> Tensor:
    """The same on one rank."""
    group = dist.group.WORLD.group_name

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        before = receive_op(x, ROWS, NUMBERS, 1, group)
        out, after = recurrence(x, before, weight)
        return attached(out, send_op(after, 1, group))

    for weight in weights:
        how = {"use_reentrant": False}
        shard = checkpoint(layer, shard, weight, **how) if checkpoints else layer(shard, weight)
    return shard


class Everywhere(torch.autograd.Function):
    """The layers as a function of global tensors, called in lockstep on all ranks."""

    @staticmethod
    def forward(ctx: Any, shards: Tensor, weights: Tensor, checkpoints: bool) -> Tensor:
        ctx.inputs = shards[dist.get_rank()].detach(), weights.detach()
        for x in ctx.inputs:
            x.requires_grad_()
        with torch.enable_grad():
            ctx.out = handed_over(*ctx.inputs, checkpoints)
        return Everywhere.gathered(ctx.out.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_shard, of_weights = torch.autograd.grad(
            ctx.out, ctx.inputs, grads[0][dist.get_rank()], retain_graph=True
        )
        dist.all_reduce(of_weights)
        return Everywhere.gathered(of_shard), of_weights, None

    @staticmethod
    def gathered(x: Tensor) -> Tensor:
        shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, x.contiguous())
        return torch.stack(shards)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (dist.get_world_size(), ROWS, NUMBERS), (LAYERS, NUMBERS)
    return tuple(torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks()
def test_equals_one_process(checkpoints: bool) -> None:
    given = inputs()
    found = []
    for out in (Everywhere.apply(*given, checkpoints), whole(*given)):
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), given)])
    found = [(x - y).abs().max().item() for x, y in zip(*found, strict=True)]
    assert max(found) < 1e-12, found


@on_ranks(2)
def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(lambda *x: Everywhere.apply(*x, False), inputs())


@on_ranks(1)
def test_ops() -> None:
    """On one rank, which receives zeros and sends to nobody."""
    # opcheck looks at .grad of copies that are no leaves, whatever it is given.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    group = dist.group.WORLD.group_name
    x = torch.randn(ROWS, NUMBERS, requires_grad=True)
    opcheck(receive_op, (x, ROWS, NUMBERS, 1, group))
    opcheck(send_op, (x, 1, group))
    half = torch.ones(ROWS, 3, dtype=torch.bfloat16)
    assert receive_op(half, ROWS, NUMBERS, 1, group).dtype == torch.float32


@on_ranks(3)
def test_a_layer_sends_one_message_each_way() -> None:
    shards, weights = inputs()
    out, forward = counted(lambda: handed_over(shards[dist.get_rank()], weights))
    _, backward = counted(lambda: out.sum().backward())
    expected = [(LAYERS, 0), (LAYERS, LAYERS), (0, LAYERS)][dist.get_rank()]
    assert (forward.messages, backward.messages) == expected


def differ() -> str:
    with pytest.raises(RingError) as error:
        call_twice(ROWS + dist.get_rank())
    return str(error.value)


def call_twice(rows: int) -> None:
    """The first rank has nobody to hear, and learns in its next call that it was wrong."""
    group = dist.group.WORLD.group_name
    for _ in range(2):
        send_op(receive_op(torch.zeros(rows, 1), rows, NUMBERS, 1, group), 1, group)


def test_ranks_that_differ_are_reported(pool: Pool) -> None:
    assert any("rows: 3 on rank 1, 2 on rank 0" in text for text in pool.run(2, differ))


class Prepared(ProcessGroupTransport):
    """Notes what it is asked, in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.asked: list[str] = []

    def prepare(self, device: torch.device) -> None:
        self.asked.append("prepare")

    def start(self, receives: Any, sends: Any) -> Any:
        self.asked.append("start")
        return super().start(receives, sends)


@on_ranks(3)
def test_all_ranks_prepare_in_their_first_call() -> None:
    """A transport may need all of them there, and the others wait for the first rank's state."""
    transport = Prepared(dist.group.WORLD)
    set_transport(dist.group.WORLD, transport)
    receive_op(torch.zeros(ROWS, 1), ROWS, NUMBERS, 1, dist.group.WORLD.group_name)
    asked = list(transport.asked)
    send_op(torch.zeros(ROWS, NUMBERS), 1, dist.group.WORLD.group_name)
    assert asked == (["prepare", "start"] if dist.get_rank() else ["prepare"])


# Rows that each rank has made, on all ranks, and their gradients on the rank that made them.

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
def test_rows_equal_one_process(pool: Pool, rows: list[int]) -> None:
    for errors in pool.run(len(rows), both_ways, rows):
        assert errors == [0.0] * 4


@pytest.mark.parametrize("what", ["rows", "width"])
@on_ranks(2)
def test_ranks_whose_rows_differ_are_reported(what: str) -> None:
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
def test_ops_of_rows() -> None:
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
