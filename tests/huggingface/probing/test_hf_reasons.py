"""What a look at a model without content finds: what mixes tokens, and why it is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from parallel_plans.huggingface.core.attention_function import attention_dropout, set_to_zero
from parallel_plans.huggingface.core.patterns import read_patterns
from parallel_plans.huggingface.probing.eligibility import check_model
from parallel_plans.huggingface.probing.probe import check_token_mixing
from parallel_plans.huggingface.probing.proxy_model import HEAD_DIM, HEADS, VOCABULARY, small_config
from tests.families import FAMILIES, SMALL, small_model
from tests.huggingface.probing.test_hf_tokenwise import Around

TEXT = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
TEXT |= {"vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}


def built(config: str, model: str, **options: Any) -> Any:
    """Without weights, which nobody needs to tell what a model is."""
    with torch.device("meta"):
        return getattr(transformers, model)(getattr(transformers, config)(**options))


def gemma3() -> Any:
    parts = {"text_config": TEXT, "vision_config": VISION}
    return built("Gemma3Config", "Gemma3ForConditionalGeneration", **parts)


def gemma4() -> Any:
    parts = {"text_config": TEXT, "vision_config": VISION, "audio_config": {"hidden_size": 8}}
    return built("Gemma4Config", "Gemma4ForConditionalGeneration", **parts)


def nemotron() -> Any:
    layers = ["moe", "linear_attention", "mlp", "full_attention"]
    options = TEXT | {"layers_block_type": layers, "num_hidden_layers": 4}
    return built("NemotronHConfig", "NemotronHForCausalLM", **options)


def granite(*layers: str) -> Any:
    options = TEXT | {"layer_types": list(layers), "mamba_n_heads": 4, "mamba_d_head": 8}
    return built("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", **options)


def with_mamba() -> Any:
    """A model of images whose language model has no plan either."""
    model = gemma3()
    model.model.language_model.layers[0].mamba = type("Mamba", (nn.Module,), {})()
    return model


def answers() -> Any:
    """A model of images whose head reads the sequence as a whole."""
    model = gemma3()
    model.__class__ = type("Gemma3ForQuestionAnswering", (type(model),), {})
    return model


REFUSED = {
    r"beside model\.vision_tower, and its head .* to its model\.language_model alone": answers,
    r"that part, model\.language_model, has no plan either: layers\.0\.mamba": with_mamba,
}


def test_reasons() -> None:
    for match, make in REFUSED.items():
        with pytest.raises(ValueError, match=match):
            check_model(make())


def test_models_of_images_and_hybrids_have_a_plan() -> None:
    for model in (granite("full_attention", "full_attention"), nemotron(), gemma3(), gemma4()):
        check_model(model)
    for build in (gemma3, gemma4):
        check_model(build().model.language_model)


GPT2 = {"n_embd": 8, "n_head": 2, "n_layer": 1}
DROPOUTS = {
    "GPT2 attn_pdrop": GPT2 | {"attn_pdrop": 0.3, "resid_pdrop": 0.3},
    "GPTBigCode attn_pdrop": GPT2 | {"attn_pdrop": 0.3, "multi_query": False},
    "Bert attention_probs_dropout_prob": {
        "attention_probs_dropout_prob": 0.3,
        "hidden_dropout_prob": 0.3,
        "intermediate_size": 8,
    },
    "OPT attention_dropout": {"attention_dropout": 0.3, "ffn_dim": 8, "word_embed_proj_dim": 8},
    "Llama attention_dropout": {"attention_dropout": 0.3, "intermediate_size": 8},
}


@pytest.mark.parametrize("case", DROPOUTS)
def test_attention_dropout_has_the_name_of_the_config(case: str) -> None:
    name, option = case.split()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    options = sizes | {"pad_token_id": 0} | DROPOUTS[case]
    config = getattr(transformers, f"{name}Config")
    head = "ForMaskedLM" if name == "Bert" else "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, name + head)
    dropping = model(config(**options)).eval()
    assert attention_dropout(dropping) == 0.3
    assert not any(module.training for module in dropping.modules())
    attending = next(
        x for x in dropping.modules() if hasattr(x, "config") and "Att" in str(type(x))
    )
    assert f"make the model with {option}=0," in set_to_zero(attending, 0.3)
    assert attention_dropout(model(config(**options | {option: 0.0})).train()) == 0


def test_attention_dropout_that_no_config_names() -> None:
    assert "with attention_dropout=0" in set_to_zero(nn.Linear(1, 1), 0.2)


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": lambda x: x + 0.1 * x.roll(1, 1),
    "reverse": lambda x: x.flip(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "index": lambda x: x + 0.1 * torch.arange(x.shape[1]).view(1, -1, 1),
    "length": lambda x: x * x.shape[1] ** 0.5,
    "number": lambda x: x * x.shape[:2].numel() ** 0.5,
}


def test_families_are_local() -> None:
    for family in FAMILIES:
        model = small_model(family).train()
        check_token_mixing(model)
        assert all(module.training for module in model.modules()), family


def test_rounding_by_the_number_of_rows_is_no_mixing() -> None:
    """As of matrix products in bfloat16, by which a router may choose another expert."""
    model = small_model("Llama").bfloat16()
    model.model.embed_tokens = Around(model.model.embed_tokens, MIXES["number"])
    check_token_mixing(model)


def test_what_mixes_tokens_is_named() -> None:
    for mix in MIXES.values():
        model = small_model("Llama")
        model.model.embed_tokens = Around(model.model.embed_tokens, mix)
        with pytest.raises(ValueError, match=r"model\.embed_tokens for a token depends"):
            check_token_mixing(model)


def test_rotary_embeddings_that_grow_or_count_by_themselves() -> None:
    growing, counting = small_model("Llama"), small_model("Llama")
    growing.model.rotary_emb.register_forward_hook(
        lambda module, args, output: tuple(x * x.shape[1] for x in output)
    )
    rotary, forward = counting.model.rotary_emb, counting.model.rotary_emb.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1]).view(1, -1))
    for model in (growing, counting):
        with pytest.raises(ValueError, match="for a token depends on tokens"):
            check_token_mixing(model)


def mixer(name: str, head: str, **options: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    config = getattr(transformers, f"{name}Config")(**sizes | options, pad_token_id=0)
    return getattr(transformers, name + head)(config)


def _without_keywords(forward: Any, hidden: Tensor, **known: Any) -> Any:
    return forward(hidden, **{name: x for name, x in known.items() if name != "ring"})


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_models_of_transformers() -> None:
    trigrams = {"intermediate_size": 16, "embedding_size": 16, "intra_bottleneck_size": 8}
    with pytest.raises(ValueError, match=r"mobilebert\.embeddings.* depends on tokens"):
        check_token_mixing(mixer("MobileBert", "ForMaskedLM", **trigrams))
    llama = mixer("Llama", "ForCausalLM", intermediate_size=16)
    for layer in llama.model.layers:  # its forward has no keywords that could be handed on
        layer.forward = partial(_without_keywords, layer.forward)
    with pytest.raises(ValueError, match="gets no keyword arguments"):
        check_token_mixing(llama)
    with pytest.raises(ValueError, match="works on its masks by itself"):
        read_patterns(mixer("Doge", "ForCausalLM", intermediate_size=16, num_key_value_heads=2))


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
