"""Sizes of models that transformers makes of a config, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from dtensor_ring import Mask
from dtensor_ring.lab.training.model_shape import ModelShape
from parallel_plans.huggingface.core.patterns import LayerMask, read_patterns
from tests.families import FAMILIES, SMALL, VOCABULARY, small_model
from tests.lab.training.test_layer_run import ALIGNED, READ

TOKENS = 16
LLAMA = SMALL | {"model_type": "llama", "intermediate_size": 24}
BARE = {
    name: x
    for name, x in LLAMA.items()
    if name not in ("model_type", "cls_token_id", "sep_token_id")
}


def _made(family: str) -> tuple[Any, Any]:
    """A small config and its model."""
    name, options = FAMILIES[family]
    kind = getattr(transformers, f"{name}TextConfig", None)
    config = (kind or getattr(transformers, f"{name}Config"))(**(SMALL | options | ALIGNED))
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
def test_flops_and_weights_are_those_of_a_model_with_content(family: str) -> None:
    config, model = _made(family)
    shape = ModelShape.of(config)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    # Without a fused kernel, all pairs are computed.
    pairs = sum(4 * TOKENS**2 * x.heads[0] * x.head_dim for x in shape.layers)
    assert counted.get_total_flops() == shape.flops * TOKENS + pairs
    # The last norm belongs to no layer.
    assert shape.weights == sum(x.numel() for x in model.parameters()) - config.hidden_size


@pytest.mark.parametrize("family", [*READ, "Granite 4, attention only"])
def test_weights_of_layers_with_a_state(family: str) -> None:
    model = small_model(family, **ALIGNED)
    expected = sum(x.numel() for x in model.parameters()) - model.config.hidden_size
    assert ModelShape.of(model.config).weights == expected


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


def test_a_config_without_a_type_is_that_of_a_llama() -> None:
    found = ModelShape.of(BARE)
    assert found.layers == ModelShape.of(LLAMA).layers
    assert found.name == "Llama by its sizes"


def test_equal_layers_are_one() -> None:
    """Every other layer has experts, the first ones run once for all."""
    config = LLAMA | {"model_type": "qwen3_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    layers = ModelShape.of(config | experts).layers
    assert [x.index for x in layers] == [0, 1, 0, 1]
    assert layers[0].weights != layers[1].weights


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BARE | {"num_experts": 2}, "a Llama, which cannot have num_experts"),
        ({"hidden_size": 8}, "a Llama, which needs intermediate_size, num_hidden_layers, num_at"),
        (7, "config must be a mapping, a config.json or its folder, got int"),
        ("/no/such/config.json", "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(config: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as error:
        ModelShape.of(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "rwkv"}, "rwkv has no attention, so there is nothing to make parallel"),
        ({"num_attention_heads": 4.0}, "must be a whole number from 1 to 2,147,483,647, got 4.0"),
        ({"hidden_size": 18}, r"hidden size \(18\) is not a multiple"),
        ({"hidden_size": 2**40}, "hidden_size of llama must be a whole number from 1"),
        ({"num_hidden_layers": 10**6}, "must be a whole number from 1 to 4,096"),
        ({"vocab_size": None}, "vocab_size of llama must be a whole number"),
        ({"num_key_value_heads": 3}, "4 heads of queries of llama are no multiple of its 3"),
        ({"layer_types": ["full_attention"]}, "transformers reads no config of llama"),
        ({"layer_types": ["linear_attention"] * 2}, "llama has layers with a state that is not"),
        ({"layer_types": ["indexed_attention"] * 2}, "kind 'indexed_attention', which are not"),
        ({"model_type": "mamba"}, "MambaMixer is a layer with a state that is not simulated"),
        ({"model_type": "modernbert"}, "sees tokens ahead"),
        ({"model_type": "llamas"}, "transformers has no models of the type 'llamas'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "does not run without content"),
    ],
)
def test_what_is_no_llama_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    config = LLAMA | changes
    with pytest.raises((TypeError, ValueError), match=message) as error:
        ModelShape.of(config)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ModelShape.of(tmp_path)


def test_without_transformers_it_says_what_to_install() -> None:
    with (
        patch.dict("sys.modules", {"transformers": None}),
        pytest.raises(ImportError, match="pip install transformers"),
    ):
        ModelShape.of(LLAMA | {"vocab_size": 72})
