"""Sizes read from a config, beside those of the model that transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from dtensor_ring import Mask
from dtensor_ring.lab.training.model_shape import ModelShape, Product
from parallel_plans.huggingface.core.patterns import LayerMask, read_patterns
from tests.families import FAMILIES, SMALL, VOCABULARY, small_model
from tests.lab.training.test_layer_states import READ

TOKENS = 16
LLAMA = SMALL | {"model_type": "llama", "intermediate_size": 24}


def _made(family: str) -> tuple[Any, Any]:
    """A small config and its model."""
    name, options = FAMILIES[family]
    kind = getattr(transformers, f"{name}TextConfig", None)
    config = (kind or getattr(transformers, f"{name}Config"))(**(SMALL | options))
    config._attn_implementation = config._experts_implementation = "eager"
    return config, getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize(
    "family",
    [
        "Llama",
        "Qwen3-MoE",
        "Gemma 3",
        "DeepSeek-V3",
        pytest.param("Qwen2", marks=pytest.mark.repeats),
        pytest.param("Gemma 2", marks=pytest.mark.repeats),
        pytest.param("Phi-3", marks=pytest.mark.repeats),
        pytest.param("OLMo 2", marks=pytest.mark.repeats),
        pytest.param("Granite", marks=pytest.mark.repeats),
        pytest.param("Mixtral, router loss", marks=pytest.mark.repeats),
    ],
)
def test_flops_and_weights_are_those_of_the_model(family: str) -> None:
    config, model = _made(family)
    shape = ModelShape.of(config)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    # Without a fused kernel, all pairs are computed.
    pairs = sum(4 * TOKENS**2 * x.heads[0] * x.head_dim for x in shape.layers)
    assert counted.get_total_flops() == shape.flops * TOKENS + pairs
    matrices = sum(x.numel() for x in model.parameters() if x.dim() > 1)
    assert shape.weights == matrices


@pytest.mark.parametrize("family", [*READ, "Granite 4, attention only"])
def test_weights_of_layers_with_a_state(family: str) -> None:
    """But convolutions, and the gate of shared experts, which has one row."""
    model = small_model(family)
    matrices = [x for x in model.parameters() if x.dim() > 1 and 1 not in x.shape]
    assert ModelShape.of(model.config).weights == sum(x.numel() for x in matrices)


@pytest.mark.parametrize(
    ("family", "masks"),
    [
        ("Llama", [Mask.causal()] * 2),
        ("Mistral, short window", [Mask.sliding(2)] * 2),
        ("Gemma 3", [Mask.sliding(4), Mask.causal()]),
        pytest.param("gpt-oss", [Mask.sliding(4), Mask.causal()], marks=pytest.mark.repeats),
        pytest.param("Llama 4", [Mask.chunked(12), Mask.causal()], marks=pytest.mark.repeats),
    ],
)
def test_masks_are_those_that_the_plan_reads(family: str, masks: list[Mask]) -> None:
    config, model = _made(family)
    assert [x.mask for x in ModelShape.of(config).layers] == masks
    read = read_patterns(model).values()
    assert {x.mask for x in read if isinstance(x, LayerMask)} == {*masks}


def test_files_folders_and_multimodal_configs(tmp_path: Path) -> None:
    expected = ModelShape.of(LLAMA)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llava", "text_config": LLAMA}))
    assert ModelShape.of(path) == ModelShape.of(str(tmp_path)) == expected
    assert expected.vocabulary == VOCABULARY


@pytest.mark.parametrize(
    ("changes", "masks"),
    [
        ({"sliding_window": 8, "model_type": "mistral"}, [Mask.sliding(7)] * 2),
        ({"sliding_window": 8, "use_sliding_window": False}, [Mask.causal()] * 2),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, [Mask.sliding(7), Mask.causal()]),
        ({"sliding_window": None}, [Mask.causal()] * 2),
    ],
)
def test_windows_of_bare_files(changes: dict[str, Any], masks: list[Mask]) -> None:
    assert [x.mask for x in ModelShape.of(LLAMA | changes).layers] == masks


def test_which_layers_have_experts() -> None:
    config = LLAMA | {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
    for changes, sparse in (
        ({}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"first_k_dense_replace": 1}, [1, 2, 3]),
        ({"mlp_only_layers": [2]}, [0, 1, 3]),
        ({"moe_layers": [0]}, [0]),
    ):
        layers = ModelShape.of(config | changes).layers
        assert [i for i, x in enumerate(layers) if x.routed == 2] == sparse, changes
    shared = ModelShape.of(config | {"n_shared_experts": 1}).layers[0]
    assert shared.mlp[-3:] == (Product(16, 24), Product(16, 24), Product(24, 16))
    assert shared.activated == 3 * 24


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_attention_heads": None}, "the config of llama has no attention"),
        ({"num_attention_heads": 4.0}, "must be a whole number from 1 to 2,147,483,647, got 4.0"),
        ({"hidden_size": 18}, "hidden_size 18 of llama is no multiple of its 4 heads"),
        ({"hidden_size": 2**31}, "hidden_size of llama must be a whole number"),
        ({"num_hidden_layers": 10**6}, "must be a whole number from 1 to 4,096"),
        ({"vocab_size": None}, "vocab_size of llama must be a whole number"),
        ({"num_key_value_heads": 3}, "4 heads of queries of llama are no multiple of its 3"),
        ({"layer_types": ["full_attention"]}, "2 layers and 1 layer_types"),
        ({"layer_types": ["conv", "conv"]}, "only gated and Kimi delta rules, Mamba 2 and conv"),
        ({"layer_types": ["recurrent"] * 2}, "kind 'recurrent', which are not simulated"),
        ({"num_experts": 2, "moe_latent_size": 8}, "experts of latents"),
        ({"sliding_window": 8}, "which say which layers have it"),
        ({"mamba_d_state": 8}, "layers with a state, which are not simulated"),
        ({"model_type": "modernbert"}, "sees tokens ahead"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "sends a token to 3 experts, and has 2"),
        (7, "config must be a mapping, a config.json or its folder, got int"),
        ("/no/such/config.json", "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(config: Any, message: str) -> None:
    config = LLAMA | config if isinstance(config, dict) else config
    with pytest.raises((TypeError, ValueError), match=message) as error:
        ModelShape.of(config)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ModelShape.of(tmp_path)


def test_models_without_gates() -> None:
    assert len(ModelShape.of(LLAMA | {"hidden_act": "relu2"}).layers[0].mlp) == 2
    assert len(ModelShape.of(LLAMA).layers[0].mlp) == 3
