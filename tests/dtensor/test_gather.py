"""Sums over the axis, and gathers whose gradients average over it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from dtensor_ring import (
    Balanced,
    Mask,
    RingError,
    SequenceAxis,
    ring_attention,
    shard_sequence,
    sum_over_sequence,
    unshard_sequence,
)
from dtensor_ring.dtensor.sequence_tensor import from_local_tokens
from tests.meshes import eager_and_compiled
from tests.pool import Pool, on_ranks


@on_ranks(3)
def test_sum_over_the_axis() -> None:
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    axis = SequenceAxis(mesh, "zigzag")
    for function in eager_and_compiled(axis.sum):
        local = torch.tensor([1.0, 2.0]).mul_(10**rank).requires_grad_()
        total = function(local)
        (total * (1 + rank)).sum().backward()
        assert total.tolist() == [111.0, 222.0]
        assert local.grad.tolist() == [6.0, 6.0], "the sum of the ranks' gradients"
    for wrong in (DTensor.from_local(local, mesh, [Shard(0)]), 1.0):
        with pytest.raises(TypeError, match="must be this rank's plain tensor, got"):
            sum_over_sequence(wrong, mesh)


Call = Callable[[DeviceMesh], None]
"""What a rank does."""


def _sum(mesh: DeviceMesh, count: int = 2, dtype: torch.dtype = torch.float32) -> None:
    local = torch.ones(count, dtype=dtype, requires_grad=dtype.is_floating_point)
    total = sum_over_sequence(local, mesh).sum()
    if local.requires_grad:
        total.backward()


def _unshard(mesh: DeviceMesh, shape: tuple[int, ...], dim: int = 1) -> None:
    unshard_sequence(shard_sequence(torch.ones(shape), mesh, dim, "zigzag"), dim)


def _unshard_batch(mesh: DeviceMesh, begin: int) -> None:
    layout = Balanced(Mask.causal(), 16, 2, (0, begin, 16), block=4)
    unshard_sequence(shard_sequence(torch.ones(16), mesh, 0, layout), 0, layout)


def _attend(mesh: DeviceMesh, validate: bool = False) -> None:
    ring_attention(*torch.ones(3, 1, 1, 4, 4), mesh=mesh, validate=validate)


def _nothing(mesh: DeviceMesh) -> None:
    pass


DIFFERENCES: dict[str, tuple[Call, Call, str]] = {
    "shapes of a sum": (_sum, partial(_sum, count=3), "numbers to sum"),
    "dtypes of a sum": (_sum, partial(_sum, dtype=torch.float64), "dtypes"),
    "shapes": (partial(_unshard, shape=(4, 8, 3)), partial(_unshard, shape=(4, 8, 2)), "head dims"),
    "lengths": (partial(_unshard, shape=(4, 8)), partial(_unshard, shape=(4, 6)), "tokens"),
    "dims": (partial(_unshard, shape=(4, 4)), partial(_unshard, shape=(4, 4), dim=0), "batch"),
    "batches": (partial(_unshard_batch, begin=3), partial(_unshard_batch, begin=9), "runs"),
    "sum, gather": (_sum, partial(_unshard, shape=(4, 8)), "direction"),
    "sum, attention": (_sum, _attend, "direction"),
    "validation, attention": (partial(_attend, validate=True), _attend, "direction"),
    "backward, a further sum": (_sum, partial(_sum, dtype=torch.int64), "dtypes"),
    "nothing, sum": (_nothing, _sum, "got no answer of rank 0"),
}
"""What rank 0 does, what rank 1 does, and what those are told that do something."""


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ(pool: Pool, name: str) -> None:
    """A gather of torch would end the process, over gloo, or mix up what differs."""
    reported = pool.run(2, _reported, name)
    *calls, expected = DIFFERENCES[name]
    for call, text in zip(calls, reported, strict=True):
        assert (expected in text) == (call is not _nothing), text
        assert "time limit" not in text, "nobody waits for it"


@on_ranks(3)
def test_one_rank_sums_while_the_others_gather() -> None:
    """Words of a sum go to all ranks, those of a gather along the ring: all raise."""
    mesh = init_device_mesh("cpu", (3,))
    with pytest.raises(RingError) as error:
        _sum(mesh) if dist.get_rank() == 1 else _unshard(mesh, (4, 9))
    text = str(error.value)
    assert "direction: " in text or "the first cause" in text or "got no answer" in text, text
    assert "time limit" not in text, "nobody waits"


def _reported(name: str) -> str:
    """What this rank is told."""
    mesh, text = init_device_mesh("cpu", (2,)), ""
    try:
        for _ in range(2):
            DIFFERENCES[name][dist.get_rank()](mesh)
    except RingError as error:
        text = str(error)
    return text


@on_ranks(2)
def test_gradients_average_over_the_axis() -> None:
    """An embedding and a tied head around a sharded part: DDP's mean is the dense gradient."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    weight, middle = torch.randn(5, 4), torch.randn(4, 4)
    tokens = torch.arange(7) % 5
    ours, dense = ([x.clone().requires_grad_() for x in (weight, middle)] for _ in range(2))
    hidden = shard_sequence(ours[0][tokens], mesh, 0, "zigzag").to_local() @ ours[1]
    whole = unshard_sequence(from_local_tokens(hidden, mesh, 0, 7), 0)
    local = sum_over_sequence(hidden.square().sum(), mesh)
    penalty = ours[1].square().sum()
    ((whole @ ours[0].T).square().sum() + local + penalty).backward()
    expected = dense[0][tokens] @ dense[1]
    logits = expected @ dense[0].T
    (logits.square().sum() + expected.square().sum() + dense[1].square().sum()).backward()
    for mine, theirs in zip(ours, dense, strict=True):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad / 2, theirs.grad)


class TwoOutputs(nn.Module):
    """Two layers on this rank's tokens, whose outputs are gathered."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.layers = mesh, nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, whole: Tensor) -> list[Tensor]:
        local = shard_sequence(whole, self.mesh, 0, "zigzag").to_local()
        parts = [from_local_tokens(layer(local), self.mesh, 0, 8) for layer in self.layers]
        return [unshard_sequence(part, 0) for part in parts]


@on_ranks(2)
def test_outputs_that_nobody_uses_under_ddp() -> None:
    model = TwoOutputs(init_device_mesh("cpu", (2,)))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    used, _ = ddp(torch.ones(8, 3))
    used.sum().backward()
    weights = [layer.weight.grad for layer in model.layers]
    assert torch.equal(weights[0], torch.full((3, 3), 8.0))
    assert weights[1] is None or not weights[1].any()
