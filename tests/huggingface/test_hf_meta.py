"""Models on the meta device: the plan, then fully_shard, then weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.dense import largest
from tests.families import HYBRIDS, VOCABULARY, small_model
from tests.huggingface.planned import (
    all_ranks,
    gradient_errors,
    relative,
    shard_weights,
    under_plan,
)
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


def sharded(family: str, folder: Path) -> Any:
    """From the meta device to the weights of a sharded checkpoint."""
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    model = under_plan(on_meta(family))
    layers = model.get_decoder().layers
    if family == "Zamba":  # FSDP wants layers with the same weights in one group
        fully_shard([*layers], mesh=all_ranks())
    shard_weights(model, () if family == "Zamba" else layers)
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
    stock = stock_model(family)
    dcp.save({"model": stock.state_dict()}, checkpoint_id=tmp_path)
    model = sharded(family, tmp_path).eval()
    assert all(isinstance(x, DTensor) for x in model.parameters())
    torch.manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (2, 23))
    losses = [x(input_ids=tokens, labels=tokens, use_cache=False).loss for x in (model, stock)]
    for loss in losses:
        loss.backward()
    found = [relative(*losses), *gradient_errors(model, stock)]
    assert len(found) > 5
    assert largest(found) < 1e-5, found


@on_ranks(1)
def test_no_proxy() -> None:
    model = on_meta("Llama")
    model.config.hidden_act = "unheard of"
    with pytest.raises(
        ValueError, match=r"on the meta device or sharded, and .* \(KeyError: .*weights first"
    ):
        under_plan(model)
