"""Why a model is refused: what is said is true, and what is advised works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from parallel_plans.huggingface.core.attention_function import attention_dropout, set_to_zero
from parallel_plans.huggingface.probing.eligibility import check_model
from tests.families import SMALL

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
