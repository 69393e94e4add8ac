"""Gradients of outputs, and of weights by outputs, are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import unshard_sequence
from parallel_plans.huggingface import context_parallel_plan
from tests import families
from tests.pool import on_ranks

TOKENS = torch.arange(26).view(2, 13) % 29 + 2
GRADIENT = torch.arange(2 * 13 * 32.0).view(2, 13, 32).sin().double()


def loss_of(x: Any) -> Tensor:
    return F.cross_entropy(x.transpose(1, 2), TOKENS * 7 % 32)


def kept(x: Any, weight: Tensor) -> list[Any]:
    x.retain_grad()
    loss_of(x).backward()
    return [x.grad, weight.grad]


def asked_for(x: Any, weight: Tensor) -> list[Any]:
    (of_output,) = torch.autograd.grad(loss_of(x), x, retain_graph=True)
    (of_weight,) = torch.autograd.grad(x, weight, GRADIENT)
    return [of_output, of_weight]


def given(x: Any, weight: Tensor) -> list[Any]:
    torch.autograd.backward([x], [GRADIENT])
    return [weight.grad]


def cached(x: Any, weight: Tensor) -> list[Any]:
    """Cut the graph at the output, as caches of gradients do."""
    cut = x.detach().requires_grad_()
    loss_of(cut).backward()
    x.backward(cut.grad)
    return [cut.grad, weight.grad]


@pytest.mark.parametrize("way", [kept, asked_for, given, cached])
@on_ranks(2)
def test_gradients(way: Callable[[Any, Tensor], list[Any]]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    ours, stock = (families.small_model("Llama", "ForCausalLM").double() for _ in range(2))
    parallelize_module(ours, mesh, context_parallel_plan(ours, "zigzag"))
    found, expected = (
        way(model(input_ids=TOKENS, use_cache=False)[0], model.get_input_embeddings().weight)
        for model in (ours, stock)
    )
    for one, other in zip(found, expected, strict=True):
        # Sums in the head are float32.
        torch.testing.assert_close(_whole(one), other, rtol=1e-5, atol=1e-6 * other.abs().max())


def _whole(gradient: Any) -> Tensor:
    """A gradient of tokens as a whole; one of a weight, averaged over the ranks."""
    if isinstance(gradient, DTensor):
        return unshard_sequence(gradient.detach(), 1)
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
