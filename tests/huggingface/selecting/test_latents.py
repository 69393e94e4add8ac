"""Attention to latents is attention to the keys and values that they expand to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_plans.huggingface.selecting.indexers import selecting_layers
from parallel_plans.huggingface.selecting.selection import (
    attend_to_latents,
    has_latents,
    keep_latents,
)
from tests.families import SELECTING, small_model

HEADS, LENGTH = 4, 9


def dense(query: Tensor, key: Tensor, value: Tensor | int, seen: Tensor, scale: float) -> Tensor:
    """Attention written out, to the keys that `seen`, `(B, L, C)`, shows."""
    value = key[..., :value] if isinstance(value, int) else value
    scores = (query @ key.mT * scale).masked_fill(~seen.unsqueeze(1), -torch.inf)
    return scores.softmax(-1) @ value


class Adapted(nn.Module):
    """A projection with an adapter beside it, as libraries put it in place of the plain one."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain, self.down = plain, nn.Linear(plain.in_features, 2, bias=False)
        self.up = nn.Linear(2, plain.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + self.up(self.down(x))


@pytest.mark.parametrize("is_adapted", [False, True])
def test_latents_equal_what_they_expand_to(is_adapted: bool) -> None:
    model = small_model("DeepSeek-V3.2").double()
    module: Any = selecting_layers(model)[0].double()
    if is_adapted:
        module.kv_b_proj = Adapted(module.kv_b_proj).double()
    torch.manual_seed(0)
    query = torch.randn(2, HEADS, LENGTH, 12, dtype=torch.float64)
    parts = [torch.randn(2, 1, LENGTH, x, dtype=torch.float64, requires_grad=True) for x in (8, 4)]
    seen = torch.rand(2, LENGTH, LENGTH) < 0.5
    seen |= torch.eye(LENGTH).bool()
    expected = dense(query, *module.expand_kv(*parts), seen, 0.3)
    weights = [*parts, *module.kv_b_proj.parameters()]
    gradients = torch.autograd.grad(expected.square().sum(), weights)
    keep_latents([module])
    assert has_latents(module)
    inputs: Any = SimpleNamespace(attend_selected=dense)
    latents, value = module.expand_kv(*parts)
    assert latents is value
    found = attend_to_latents(module, (query, latents), seen, inputs, {"scale": 0.3})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(found.square().sum(), weights)
    torch.testing.assert_close(ours, gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", SELECTING)
def test_all_layers_keep_latents(family: str) -> None:
    layers = selecting_layers(small_model(family))
    assert len(layers) == 3
    keep_latents(layers)
    assert all(has_latents(x) for x in layers)


def test_modules_without_latents_stay() -> None:
    plain = nn.Linear(2, 2)
    keep_latents([plain])
    assert not has_latents(plain)
