"""Models whose layers carry a state along the sequence, under their plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface import context_parallel_plan
from tests.families import small_model

LAYOUT = "contiguous"


def planned(
    family: str,
    layout: str | None = LAYOUT,
    *,
    max_position_embeddings: int = 64,
    **options: Any,
) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = small_model(family, max_position_embeddings=max_position_embeddings)
    return parallelize_module(model, mesh, context_parallel_plan(model, layout, **options))


def gradients(model: Any) -> Tensor:
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]
    return torch.cat([x.flatten() for x in grads])
