"""What is read from the masks of Hugging Face models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from dtensor_ring import Mask
from parallel_plans.huggingface.core.model_masks import ModelMask
from parallel_plans.huggingface.core.patterns import (
    LayerMask,
    LayerPattern,
    pattern_of,
    read_patterns,
)
from tests.families import small_model

CAUSAL, FULL = Mask.causal(), Mask.full()
READ = {
    "Llama": [(CAUSAL, True)],
    "Mistral, short window": [(Mask.sliding(2), True)],
    "Gemma 2": [(CAUSAL, True), (Mask.sliding(4), True)],
    "gpt-oss": [(CAUSAL, False), (Mask.sliding(4), False)],
    "Llama 4": [(CAUSAL, True), (Mask.chunked(12), True)],
    "ModernBERT": [(FULL, False), (Mask.local(3, 3), False)],
    "BERT": [(FULL, False)],
}


def test_families() -> None:
    for family, expected in READ.items():
        found = read_patterns(small_model(family)).values()
        assert set(found) == {LayerMask(*layer_mask) for layer_mask in expected}, family


def test_a_window_of_nothing_else() -> None:
    layer_masks = read_patterns(small_model("ModernBERT", local_attention=1)).values()
    assert LayerMask(Mask.local(0, 0), False) in layer_masks


def test_a_window_of_its_own_is_read_too() -> None:
    """Gemma 3 for embeddings adds mask functions, which look both ways."""
    layer_masks = read_patterns(small_model("Gemma 3", use_bidirectional_attention=True))
    assert {x.mask for x in layer_masks.values() if isinstance(x, LayerMask)} >= {FULL}


def _every_third(*index: Any) -> Any:
    return index[3] % 3 == 0


def _by_token(*index: Any) -> Any:
    return torch.ones(2, dtype=torch.bool)[index[3]]


@pytest.mark.parametrize(
    ("function", "match"), [(_every_third, "is not one of"), (_by_token, "looks at the batch")]
)
def test_patterns_that_no_ring_has(
    monkeypatch: pytest.MonkeyPatch, function: Any, match: str
) -> None:
    monkeypatch.setattr(masking_utils, "causal_mask_function", function)
    (reason,) = read_patterns(small_model("Llama")).values()
    assert isinstance(reason, str)
    assert match in reason


def test_two_patterns_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("Llama 4")
    monkeypatch.setattr(
        masking_utils, "chunked_overlay", lambda *_: masking_utils.causal_mask_function
    )
    model.config.sliding_window = model.config.attention_chunk_size
    monkeypatch.setattr(
        "transformers.models.llama4.modeling_llama4.create_causal_mask",
        masking_utils.create_sliding_window_causal_mask,
    )
    layer_masks = read_patterns(model)
    assert {x.layer: layer_masks[x].mask for x in layer_masks if isinstance(x, LayerPattern)} == {
        0: CAUSAL,
        1: Mask.sliding(11),
    }
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0
    assert any("would tell which layer" in str(x) for x in read_patterns(model).values())


def test_names_tell_what_the_model_added() -> None:
    plain, custom = pattern_of(), pattern_of(use_vmap=True)
    blocks = pattern_of(allow_is_causal_skip=False)
    assert len({plain, custom, pattern_of(local_size=4)}) == 3
    assert blocks == custom
    assert pattern_of(allow_is_causal_skip=False, allow_is_bidirectional_skip=True)[1] is False


def test_models_may_cut_masks_of_which_all_is_left() -> None:
    """As Gemma 4 does before the layers that share keys and values."""
    pattern = pattern_of(local_size=4)
    mask = ModelMask(pattern, lambda *_: True, (1, 8), None)
    for whole in (pattern, mask):
        assert whole[:, :, slice(-0, None), :] is whole
        assert whole[..., :] is whole
        with pytest.raises(ValueError, match="takes a part of its mask"):
            whole[:, :, -1:, :]
    assert pattern[2] == pattern.size == 4
