"""What is read from the masks of models: patterns, and ranges of tokens as of images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import masking_utils

from dtensor_ring import Mask
from parallel_plans.huggingface.core.model_masks import ModelMask, mask_of, precomputed_masks
from parallel_plans.huggingface.core.model_masks import largest as largest_of
from parallel_plans.huggingface.core.patterns import (
    MARKER,
    LayerMask,
    LayerPattern,
    pattern_of,
    read_patterns,
)
from tests.dense import largest
from tests.families import small_model
from tests.huggingface.planned import under_plan
from tests.pool import on_ranks
from tests.slices import shown

SEQ_LEN, VOCABULARY, STEPS = 30, 48, 4
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    text = TEXT | {"sliding_window": 6, "layer_types": layers}
    config = Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=47
    )
    return Gemma3ForConditionalGeneration(config)


def paligemma() -> Any:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    text = TEXT | {"model_type": "gemma"}
    vision = VISION | {"model_type": "siglip_vision_model", "projection_dim": 32}
    config = PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=47, projection_dim=32
    )
    return PaliGemmaForConditionalGeneration(config)


MODELS = {"Gemma 3": gemma3, "PaliGemma": paligemma}


def batch_of(name: str, step: int) -> dict[str, Tensor]:
    """Of Gemma 3 two images in the first row, one at the end of the second, whose begin is padding.

    Of PaliGemma the rest of the row is what it shall say, the begin a prefix.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(2, VOCABULARY - 2, (2, SEQ_LEN), generator=generator)
    index = torch.arange(SEQ_LEN)
    if name == "PaliGemma":
        types = (index >= torch.tensor([[7], [15 + step]])).long()
        return {"input_ids": tokens, "token_type_ids": types, "labels": tokens}
    images = torch.stack([(index >= 3) & (index < 14) | (index >= 20) & (index < 23), index >= 21])
    is_token = index >= torch.tensor([[0], [4]])
    return {
        "input_ids": tokens * is_token,
        "token_type_ids": images.long(),
        "attention_mask": is_token.long(),
        "labels": tokens.masked_fill(~(is_token & is_token.roll(1, -1)), -100),
    }


def train(name: str, model: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        loss = model(**batch_of(name, step), use_cache=False).loss
        loss.backward()
        for x in model.parameters():
            if x.grad is not None:
                dist.all_reduce(x.grad)
                x.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: x.detach() for key, x in model.named_parameters()}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().train()


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_trains_as_one_process(name: str) -> None:
    """Other layouts and more ranks are those of whole models, see test_images.py."""
    layout = "balanced"
    stock, model = made(name), made(name)
    text = model.model.language_model
    under_plan(text, layout, unshard_outputs=True)
    with pytest.raises(ValueError, match=r'text_config\._attn_implementation = "ring"'):
        model(**batch_of(name, 0))
    model.config.text_config._attn_implementation = "ring"
    (ours, parameters), (theirs, expected) = train(name, model), train(name, stock)
    errors = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    errors = errors + [
        ((parameters[x] - y).norm() / y.norm().clamp(min=1e-2)).item() for x, y in expected.items()
    ]
    assert largest(errors) < 1e-5


def model_mask(seen: Tensor, padding: Tensor | None = None, past: int = 0) -> ModelMask:
    """The mask `(B, S, S)` as a function of rows, queries and keys, of queries from `past` on."""
    pattern, shape = (MARKER, True, None, True), (len(seen), seen.shape[1] - past)
    return ModelMask(pattern, lambda b, _, q, k: seen[b, q, k], shape, padding, past)


def test_ranges_are_read() -> None:
    index = torch.arange(9)
    image = (index >= 3) & (index < 6)
    causal = index[:, None] >= index
    seen = torch.stack([causal | (image[:, None] & image), causal & (index > index[:, None] - 4)])
    padding = index.expand(2, -1) < torch.tensor([[9], [7]])
    for mask, expected in (
        (model_mask(seen), seen),
        (model_mask(seen, padding), seen & padding[:, None] & padding[..., None]),
    ):
        for table, row in zip(mask.precompute().slices(), expected, strict=True):
            assert torch.equal(torch.from_numpy(shown(table, (9, 9))), row.long())


@pytest.mark.parametrize("origin", [0, 2, 5])
def test_ranges_of_new_tokens_are_read(origin: int) -> None:
    """After those of a cache, which ask nothing; positions count from the origin."""
    index = torch.arange(9)
    image = (index >= 5) & (index < 8)
    seen = (index[:, None] >= index) | (image[:, None] & image)
    seen = torch.stack([seen, seen & (index > index[:, None] - 4)])
    padding = index.expand(2, -1) >= torch.tensor([[0], [2]])
    expected = seen & padding[:, None] & padding[..., None] & (index[:, None] >= 5)
    slices = model_mask(seen, padding, past=5).precompute().slices(origin)
    for table, row in zip(slices, expected[:, origin:, origin:], strict=True):
        assert torch.equal(torch.from_numpy(shown(table, row.shape)), row.long())


def in_pieces(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Two pieces of one image, of which no token is at a usual distance of another."""
    first, second = ((x >= 1000) & (x < 1030) | (x >= 2950) & (x < 2980) for x in (q, k))
    return (q >= k) | (first & second)


def test_more_than_one_range_is_refused() -> None:
    """Of a token, of tokens far apart, or of heads."""
    pattern, seen = (MARKER, True, None, True), torch.ones(1, 9, 9, dtype=torch.bool)
    seen[0, 8, 4] = False
    for mask in (
        model_mask(seen),
        ModelMask(pattern, in_pieces, (1, 8192), None),
        ModelMask(pattern, lambda b, h, q, k: (q >= k) & (q - k <= 3 + h), (1, 9), None),
    ):
        with pytest.raises(ValueError, match="each token sees one range"):
            mask.precompute()
    with pytest.raises(ValueError, match="an attention_mask of 9 tokens came with 8 tokens"):
        precomputed_masks({"full_attention": model_mask(seen)}, 8)


def test_masks_of_a_compiled_model_are_refused() -> None:
    mask = {"full_attention": mask_of(mask_function=None)}
    with pytest.raises(ValueError, match="for full_attention cannot be read while the model is"):
        precomputed_masks(mask, 8)


@pytest.mark.parametrize("padding", [None, torch.ones(1, 9, dtype=torch.bool)])
def test_masks_of_layers_with_a_state_stay(padding: Tensor | None) -> None:
    """They are padding, beside those of attention, as in the outer model of Inkling."""
    seen = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    given = {"full_attention": model_mask(seen), "linear_attention": padding}
    found = precomputed_masks(given, 9)
    assert found["linear_attention"] is padding
    (table,) = largest_of(found)
    assert torch.equal(torch.from_numpy(shown(table, (9, 9))), seen[0].long())


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
