"""What a state adds to a scan from zero, against float64, and against the scan's own states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.qwen3_next import modeling_qwen3_next

from dtensor_ring import StateMap
from parallel_plans.huggingface.states.scans import SCANS

SHARDS = 4
LENGTHS = (2048, pytest.param(1 << 16, marks=pytest.mark.repeats))
NAMES = {
    "torch_chunk_gated_delta_rule": modeling_qwen3_next,
    "mamba2_chunk_scan": modeling_granitemoehybrid,
}


def inputs(name: str, length: int) -> list[Tensor]:
    """Tensors by token, with decays so slow that all tokens matter."""
    torch.manual_seed(0)
    if name == "mamba2_chunk_scan":
        x, steps = torch.randn(1, length, 2, 4), torch.rand(1, length, 2) * 1e-2
        return [x, steps, *torch.randn(2, 1, length, 1, 8).unbind()]
    query, key, value = torch.randn(3, 1, length, 2, 8).unbind()
    query, key = (nn.functional.normalize(x, dim=-1) for x in (query, key))
    return [query, key, value, -torch.rand(1, length, 2) * 1e-3, torch.rand(1, length, 2)]


A = -torch.tensor([0.1, 1.0])


def called(name: str, scan: Callable[..., Any], given: list[Tensor]) -> Tensor:
    if name == "mamba2_chunk_scan":
        x, steps, b, c = given
        return scan(x, steps, A, b, c, chunk_size=64, return_final_states=True)[0]
    query, key, value, g, beta = given
    return scan(query, key, value, g=g, beta=beta, output_final_state=True)[0]


def exact(name: str, given: list[Tensor]) -> Tensor:
    """One token after another, in float64."""
    outs, by_token = [], zip(*(x[0].double() for x in given), strict=True)
    if name == "mamba2_chunk_scan":
        state = torch.zeros(2, 4, 8, dtype=torch.float64)
        for value, step, own, read in by_token:
            state = state * (A * step).exp()[:, None, None]
            state = state + (value * step[:, None])[:, :, None] * own[:, None]
            outs.append((state @ read[0][:, None])[:, :, 0])
        return torch.stack(outs)[None]
    state = torch.zeros(2, 8, 8, dtype=torch.float64)
    for q, k, v, decay, rate in by_token:
        state = state * decay.exp()[:, None, None]
        delta = (v - (k[:, None] @ state)[:, 0]) * rate[:, None]
        state = state + k[:, :, None] * delta[:, None]
        outs.append((q[:, None] @ state)[:, 0] * q.shape[-1] ** -0.5)
    return torch.stack(outs)[None]


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_error_of_shards(name: str, length: int) -> None:
    """Is not larger than 1.5 times that of one process."""
    given, plain = inputs(name, length), getattr(NAMES[name], name)
    states: list[Tensor] = []

    def pass_on(own: StateMap) -> Tensor | None:
        before = states[-1] if states else None
        states.append(own.state if before is None else own.after(before))
        return before

    parts = zip(*(x.chunk(SHARDS, 1) for x in given), strict=True)
    outs = [
        called(name, SCANS[name](plain, pass_on, number > 0), [*part])
        for number, part in enumerate(parts)
    ]
    expected = exact(name, given)
    whole, sharded = (
        (x.double() - expected).norm() / expected.norm()
        for x in (called(name, plain, given), torch.cat(outs, 1))
    )
    assert sharded <= 1.5 * whole, (sharded, whole)
