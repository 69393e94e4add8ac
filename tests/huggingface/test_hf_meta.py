"""Models on the meta device: the plan, then fully_shard, then weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface import context_parallel_plan
from tests.dense import largest
from tests.families import HYBRIDS, VOCABULARY, small_model
from tests.pool import on_ranks

FAMILIES = ("Llama", "Gemma 3", "Qwen3-MoE", "gpt-oss", "DeepSeek-V3.2", "Granite 4", "LFM2")
FAMILIES += ("Inkling", "MiniMax M3", "Qwen4-Exp", "DeepSeek-V4")
WIDE: dict[str, dict[str, Any]] = {
    "LFM2": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "Inkling": {"hidden_size": 24},
}
"""That of Inkling differs from what its keys are convolved in."""


def stock_model(family: str) -> Any:
    """A model with weights; some hybrids are wider or deeper than their proxy."""
    return small_model(family, **WIDE.get(family, {}))


def on_meta(family: str) -> Any:
    """Without weights, as torchtitan's users make models."""
    stock = stock_model(family)
    with torch.device("meta"):
        model = type(stock)(stock.config)
    return model


def sharded(family: str, folder: str) -> Any:
    """From the meta device to the weights of a sharded checkpoint."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = on_meta(family)
    parallelize_module(model, mesh, context_parallel_plan(model))
    layers = model.get_decoder().layers
    # FSDP wants layers with the same weights in one group.
    for group in [[*layers]] if family == "Zamba" else layers:
        fully_shard(group, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for module in model.modules():  # buffers that no checkpoint has
        if module._non_persistent_buffers_set:
            is_made_around = type(module).__name__ == "FalconH1Mixer"
            model._init_weights(model.base_model if is_made_around else module)
    state = get_model_state_dict(model)
    dcp.load({"model": state}, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return model


@pytest.mark.needs("--all-hybrids", but=lambda family: family in FAMILIES or family not in HYBRIDS)
@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        pytest.param("GLM-5-Next", marks=pytest.mark.repeats),
        *(x for x in HYBRIDS if x not in FAMILIES),
    ],
)
@on_ranks(2)
def test_sharded_and_loaded_equals_one_process(tmp_path: Path, family: str) -> None:
    """Of the loss and the gradients, relative."""
    folder = str(tmp_path)
    stock = stock_model(family)
    dcp.save({"model": stock.state_dict()}, checkpoint_id=folder)
    model = sharded(family, folder).eval()
    assert all(isinstance(x, DTensor) for x in model.parameters())
    torch.manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (2, 23))
    losses = [x(input_ids=tokens, labels=tokens, use_cache=False).loss for x in (model, stock)]
    for loss in losses:
        loss.backward()
    found = [((losses[0] - losses[1]) / losses[1]).abs().item()]
    scale = torch.stack([x.grad.norm() for x in stock.parameters() if x.grad is not None]).max()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        if theirs.grad is not None:
            difference = (ours.grad.full_tensor() - theirs.grad).norm()
            found.append((difference / theirs.grad.norm().clamp(min=1e-2 * scale)).item())
    assert len(found) > 5
    assert largest(found) < 1e-5, found


@on_ranks(1)
def test_no_proxy() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    model = on_meta("Llama")
    model.config.hidden_act = "unheard of"
    with pytest.raises(
        ValueError, match=r"on the meta device or sharded, and .* \(KeyError: .*weights first"
    ):
        parallelize_module(model, mesh, context_parallel_plan(model))
