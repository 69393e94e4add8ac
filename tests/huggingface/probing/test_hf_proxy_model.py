"""A small proxy is of the kind of the large model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from parallel_plans.huggingface.probing.proxy_model import HEAD_DIM, HEADS, VOCABULARY, small_config

LAYERS = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "kinds of layers": (
        "Gemma3Text",
        {"layer_types": LAYERS, "num_hidden_layers": 6, "sliding_window": 777},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 777},
    ),
    "layers that share keys and values": (
        "Gemma4Text",
        {"layer_types": LAYERS[2:4] * 3, "num_hidden_layers": 6, "num_kv_shared_layers": 4},
        {"layer_types": LAYERS[2:4] * 2, "num_kv_shared_layers": 2},
    ),
    "as many key heads as heads": (
        "Llama",
        {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 512},
        {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": 2},
    ),
    "grouped heads": ("Llama", {"num_key_value_heads": 8}, {"num_key_value_heads": 2}),
    "one key head": ("Llama", {"num_key_value_heads": 1}, {"num_key_value_heads": 1}),
    "dense layers before experts": (
        "DeepseekV3",
        {},
        {"first_k_dense_replace": 1, "num_hidden_layers": 2, "head_dim": 4, "n_routed_experts": 4},
    ),
    "tokens": ("Llama", {"eos_token_id": [128001, 5]}, {"eos_token_id": [128001 % VOCABULARY, 5]}),
    "layers of attention that are wider": (
        "Zamba2",
        {},
        {"attention_hidden_size": 64, "attention_head_dim": 16, "hybrid_layer_ids": [1]},
    ),
    "factors of rotary embeddings": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 48,
                "long_factor": [2.0] * 48,
            },
        },
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_is_of_the_same_kind(case: str) -> None:
    name, options, expected = CASES[case]
    large = getattr(transformers, f"{name}Config")(**options)
    small = small_config(large)
    assert {key: getattr(small, key) for key in expected} == expected
    assert getattr(large, "num_hidden_layers", 0) != small.num_hidden_layers, "a copy"
    model: Any = transformers.AutoModelForCausalLM.from_config(small)
    assert sum(x.numel() for x in model.parameters()) < 300_000
    tokens = torch.arange(8).unsqueeze(0)
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
    rope = small.rope_parameters
    assert len(rope.get("long_factor", [0] * (HEAD_DIM // 2))) == HEAD_DIM // 2


def test_parts_are_small_too() -> None:
    small = small_config(transformers.Qwen2VLConfig())
    assert small.text_config.rope_parameters["mrope_section"] == [2, 1, 1]
    assert small.text_config.vocab_size == VOCABULARY
    assert small.vision_config.depth == 2
