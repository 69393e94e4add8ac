"""Models under their plan, trained the way people train: FSDP2 and checkpointing."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_ring.op import ring_backward_op, ring_op
from parallel_plans.huggingface import context_parallel_plan, ring_checkpoint_contexts
from tests.families import VOCABULARY, small_model
from tests.pool import Pool

STEPS, SEQ_LEN = 10, 24
CHECKPOINTING = {
    "none": None,
    "full": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": ring_checkpoint_contexts},
}


class RingCalls(TorchDispatchMode):
    """Counts the calls of both ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += func in (ring_op, ring_backward_op)
        return func(*args, **kwargs or {})


def batch_of(step: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(step))


def train(model: Any, rows: slice) -> tuple[list[float], Counter[Any]]:
    """Losses of the steps, and ring calls of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, counts = [], Counter()
    for step in range(STEPS):
        tokens = batch_of(step)[rows]
        with RingCalls() as calls:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        counts = calls.counts
    return losses, counts


def sharded(family: str, checkpointing: dict[str, Any] | None) -> tuple[Any, int]:
    """A model on (dp, cp) ranks under FSDP2, and this rank's index of dp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = small_model(family).train()
    parallelize_module(model, mesh["cp"], context_parallel_plan(model))
    if checkpointing:
        model.activation_checkpointing_enable(checkpointing)
    shards = mesh["dp", "cp"]._flatten("dp_cp")
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=shards)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2)  # by the ranks of dp: those of cp add up
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    return model, mesh["dp"].get_local_rank()


def train_both(family: str, checkpointing: dict[str, Any] | None) -> dict[str, Any]:
    """Differences of loss and parameters from one process, and ring calls of a step."""
    # The sharded logits are a view of the local ones, which FSDP2 says not to write to.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    model, row = sharded(family, checkpointing)
    stock = small_model(family).train()
    losses, counts = train(model, slice(row, row + 1))
    expected, _ = train(stock, slice(None))
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    states = get_model_state_dict(model), stock.state_dict()
    whole = {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in states[0].items()}
    return {
        "loss": (mean / 4 - torch.tensor(expected)).abs().max().item(),
        "parameters": max(
            ((whole[name] - x).norm() / x.norm()).item() for name, x in states[1].items()
        ),
        "calls": (counts[ring_op], counts[ring_backward_op]),
    }


@pytest.mark.parametrize(
    ("name", "calls"), [("none", (2, 2)), ("full", (4, 2)), ("selective", (2, 2))]
)
def test_ten_steps_of_fsdp_equal_one_process(pool: Pool, name: str, calls: tuple[int, int]) -> None:
    """Selective checkpointing makes one ring forward and one backward for each of two layers."""
    for found in pool.run(4, train_both, "Llama", CHECKPOINTING[name]):
        assert found["calls"] == calls
        assert found["loss"] < 1e-5, found
        assert found["parameters"] < 1e-5, found
