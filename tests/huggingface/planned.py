"""Models under their plan, and what differs from a stock model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface import context_parallel_plan
from tests.dense import largest


def all_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def under_plan(
    model: Any, layout: str | None = None, mesh: DeviceMesh | None = None, **options: Any
) -> Any:
    """The model itself, over a mesh or all ranks."""
    plan = context_parallel_plan(model, layout, **options)
    return parallelize_module(model, all_ranks() if mesh is None else mesh, plan)


def shard_weights(
    model: Any, parts: Iterable[nn.Module], mesh: DeviceMesh | None = None, **options: Any
) -> None:
    """By FSDP2: each part is a group, and the rest of the model is one."""
    # The hidden states of a rank are a view, which FSDP2 says not to write to.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for module in (*parts, model):
        fully_shard(module, mesh=all_ranks() if mesh is None else mesh, **options)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no means


def relative(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The norm of what differs, relative to that of what is expected, or the least that counts."""
    return ((found - expected).norm() / expected.norm().clamp(min=least)).item()


def gradient_errors(
    model: nn.Module, stock: nn.Module, group: Any = None, floor: float = 1e-2
) -> list[float]:
    """Relative to each gradient of the stock model, or to a part, the floor, of the largest."""
    pairs = [
        (averaged(ours.grad, group), theirs.grad)
        for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True)
        if theirs.grad is not None
    ]
    least = floor * largest(x.norm().item() for _, x in pairs)
    return [relative(found, expected, least) for found, expected in pairs]


def averaged(grad: Any, group: Any = None) -> Tensor:
    """Over the ranks of a group, or over all if FSDP2 did not do it."""
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    if group is not None or not isinstance(grad, DTensor):
        dist.all_reduce(whole.div_(dist.get_world_size(group)), group=group)
    return whole


Results = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Loss, logits and gradients by name."""


def errors_of(found: Results, expected: Results) -> dict[str, float]:
    """Of loss, logits and each gradient, which is averaged over all ranks."""
    (loss, logits, grads), (stock_loss, stock_logits, stock_grads) = found, expected
    assert grads.keys() == stock_grads.keys()
    least = 1e-2 * largest(x.norm().item() for x in stock_grads.values())
    return {"loss": relative(loss, stock_loss), "logits": relative(logits, stock_logits)} | {
        name: relative(averaged(grads[name]), x, least) for name, x in stock_grads.items()
    }
