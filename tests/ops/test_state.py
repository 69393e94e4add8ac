"""States that go along the ranks, against the same layers in one process."""

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
from dtensor_ring.ops.axis_ops import attached, receive_op, send_op
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


def gradcheck() -> bool:
    return torch.autograd.gradcheck(lambda *x: Everywhere.apply(*x, False), inputs())


def test_gradcheck(pool: Pool) -> None:
    assert pool.run(2, gradcheck) == [True] * 2


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


def messages() -> tuple[int, int]:
    """How many this rank sent forward, and backward."""
    shards, weights = inputs()
    out, forward = counted(lambda: handed_over(shards[dist.get_rank()], weights))
    _, backward = counted(lambda: out.sum().backward())
    return forward.messages, backward.messages


def test_a_layer_sends_one_message_each_way(pool: Pool) -> None:
    found = pool.run(3, messages)
    assert found == [(LAYERS, 0), (LAYERS, LAYERS), (0, LAYERS)]


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


def asked_of_transport() -> list[str]:
    transport = Prepared(dist.group.WORLD)
    set_transport(dist.group.WORLD, transport)
    receive_op(torch.zeros(ROWS, 1), ROWS, NUMBERS, 1, dist.group.WORLD.group_name)
    asked = list(transport.asked)
    send_op(torch.zeros(ROWS, NUMBERS), 1, dist.group.WORLD.group_name)
    return asked


def test_all_ranks_prepare_in_their_first_call(pool: Pool) -> None:
    """A transport may need all of them there, and the others wait for the first rank's state."""
    moves = ["prepare", "start"]
    assert pool.run(3, asked_of_transport) == [["prepare"], moves, moves]
