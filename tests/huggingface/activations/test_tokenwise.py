"""Which modules of a model run over tiles of tokens, and that the model stays what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel_plans.huggingface.activations.kept_for_backward import KeptForBackward
from parallel_plans.huggingface.activations.token_tiles import tokenwise_modules
from parallel_plans.huggingface.core.modules import language_model_of
from tests.dense import largest
from tests.families import (
    BESIDE_POOLS,
    CHOOSES_BLOCKS,
    CHOOSES_POOLS,
    FAMILIES,
    HYBRIDS,
    SELECTING,
    VOCABULARY,
    small_model,
)

NORMS = ("input_layernorm", "post_attention_layernorm")
FOUND: dict[str, list[str]] = {
    "Llama": [*NORMS, "mlp"],
    "Qwen3-MoE": [*NORMS, "mlp", "self_attn.q_norm", "self_attn.k_norm"],
    "gpt-oss": [*NORMS, "mlp"],
    # Its norms of queries and keys see heads before tokens.
    "Gemma 3": [*NORMS, "mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"],
}
"""Of the first layer."""
WITHOUT = ("OPT",)
"""Has fused norms, and the products of its MLPs are modules of the layer."""
DEFAULT = ("Llama", "Qwen3-MoE, router loss", "gpt-oss", "Gemma 3", "Qwen3-Next", "Nemotron-H")
DEFAULT += ("DeepSeek-V3.2", "MiniMax M3", "GLM-5-Next", "DeepSeek-V4")


@pytest.mark.parametrize("family", FOUND)
def test_found_by_what_they_keep(family: str) -> None:
    model = small_model(family)
    before = model.config._attn_implementation
    names = tokenwise_modules(language_model_of(model))
    first = "model.layers.0."
    assert {x.removeprefix(first) for x in names if x.startswith(first)} == set(FOUND[family])
    assert "model.norm" in names
    assert model.config._attn_implementation == before
    assert not any(x._forward_hooks for x in model.modules())


@pytest.mark.parametrize(
    "family",
    [
        *DEFAULT,
        *(
            pytest.param(family, marks=pytest.mark.repeats)
            for family in {
                **FAMILIES,
                **HYBRIDS,
                **SELECTING,
                **CHOOSES_BLOCKS,
                **CHOOSES_POOLS,
                **BESIDE_POOLS,
            }
            if family not in (*DEFAULT, *WITHOUT)
        ),
    ],
)
def test_models_over_tiles(family: str) -> None:
    """Without a mesh: loss and all gradients are those of the model, but for rounding."""
    tokens = torch.arange(2 * 9).view(2, 9) % VOCABULARY
    found: list[list[Any]] = []
    for kept in (KeptForBackward(), KeptForBackward(mlp_tile=5)):
        model = small_model(family)
        kept.install(model)
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        loss = model(**batch, labels=tokens, use_cache=False).loss
        loss.backward()
        found.append([loss, *(x.grad for x in model.parameters() if x.grad is not None)])
    scale = max(x.norm().item() for x in found[0])
    errors = [(tiled - whole).norm().item() for whole, tiled in zip(*found, strict=True)]
    assert largest(errors) < 1e-5 * scale, errors


@pytest.mark.parametrize("family", WITHOUT)
def test_none_found(family: str) -> None:
    name = type(small_model(family)).__name__
    with pytest.raises(ValueError, match=rf"mlp_tile=5: no module of {name} .* leave it out"):
        KeptForBackward(mlp_tile=5).install(small_model(family))
