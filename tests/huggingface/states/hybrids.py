"""Models whose layers carry a state along the sequence, under their plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.families import small_model
from tests.huggingface.planned import under_plan

LAYOUT = "contiguous"


def planned(
    family: str,
    layout: str | None = LAYOUT,
    *,
    max_position_embeddings: int = 64,
    **options: Any,
) -> Any:
    model = small_model(family, max_position_embeddings=max_position_embeddings)
    return under_plan(model, layout, **options)


def gradients(model: Any) -> Tensor:
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]
    return torch.cat([x.flatten() for x in grads])
