"""Small models that read images and text, with random weights, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from tests.families import LLAMA4

VOCABULARY, IMAGE, SEQ_LEN, TOKENS_OF_IMAGE = 48, 47, 29, 4
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
LAYERS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
AXES = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 16,
}
LLAMA, CLIP = TEXT | {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}
Images = Callable[[list[int]], dict[str, Tensor]]
"""What a model gets of images, by how many of them each row has."""


def pixels(counts: list[int]) -> dict[str, Tensor]:
    """Images of one size, one after the other."""
    return {"pixel_values": torch.randn(sum(counts), 3, 16, 16)}


def sized(counts: list[int]) -> dict[str, Tensor]:
    """Images that come with their sizes."""
    return pixels(counts) | {"image_sizes": torch.full((sum(counts), 2), 16)}


def by_row(counts: list[int]) -> dict[str, Tensor]:
    """As many images in each row, of which those of zeros are none."""
    images = torch.randn(len(counts), max(counts), 3, 16, 16)
    for row, count in zip(images, counts, strict=True):
        row[count:] = 0
    return {"pixel_values": images}


def patches(counts: list[int]) -> dict[str, Tensor]:
    """Patches of all images: 4 by 4, each of two times 3 by 4 by 4 numbers."""
    number = sum(counts)
    return {
        "pixel_values": torch.randn(number * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * number),
    }


def placed(counts: list[int]) -> dict[str, Tensor]:
    """Patches of each image, and where they are in it."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    number = sum(counts)
    return {
        "pixel_values": torch.rand(number, 16, 3 * 4 * 4),
        "image_position_ids": places.expand(number, -1, -1),
    }


class Family(NamedTuple):
    """How to build a small model, and what it is called with."""

    name: str
    """Of its classes."""
    text: dict[str, Any]
    vision: dict[str, Any]
    options: dict[str, Any]
    images: Images
    types: str = ""
    """The argument that says which tokens are of images; in PaliGemma, which are no prefix."""
    has_axes: bool = False


FAMILIES: dict[str, Family] = {
    "Gemma 3": Family(
        "Gemma3",
        TEXT | LAYERS,
        VISION,
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE},
        pixels,
        "token_type_ids",
    ),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VL",
        TEXT | AXES | {"hidden_size": 32, "bos_token_id": 1, "eos_token_id": 1},
        QWEN_VISION | {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
        {"image_token_id": IMAGE, "video_token_id": 46},
        patches,
        "mm_token_type_ids",
        has_axes=True,
    ),
    "LLaVA": Family(
        "Llava",
        LLAMA,
        CLIP | {"num_hidden_layers": 2, "patch_size": 8},
        {"image_token_index": IMAGE, "vision_feature_layer": -1},
        pixels,
    ),
    "PaliGemma": Family(
        "PaliGemma",
        TEXT | {"model_type": "gemma"},
        VISION | {"model_type": "siglip_vision_model", "patch_size": 8, "projection_dim": 16},
        {"image_token_index": IMAGE, "projection_dim": 16},
        pixels,
        "token_type_ids",
    ),
    "PaliGemma 2": Family(
        "PaliGemma",
        TEXT | LAYERS | {"model_type": "gemma2", "query_pre_attn_scalar": 8},
        VISION | {"model_type": "siglip_vision_model", "patch_size": 8, "projection_dim": 16},
        {"image_token_index": IMAGE, "projection_dim": 16},
        pixels,
        "token_type_ids",
    ),
    "Mistral 3": Family(
        "Mistral3",
        TEXT | {"model_type": "mistral", "sliding_window": None},
        VISION | {"model_type": "pixtral", "head_dim": 8},
        {"image_token_index": IMAGE, "spatial_merge_size": 2, "vision_feature_layer": -1},
        sized,
    ),
    "InternVL": Family(
        "InternVL",
        TEXT | {"model_type": "qwen2"},
        VISION | {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_token_id": IMAGE, "downsample_ratio": 0.5},
        pixels,
    ),
    "SmolVLM": Family(
        "SmolVLM",
        LLAMA,
        VISION,
        {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0},
        by_row,
    ),
    "Qwen3-VL": Family(
        "Qwen3VL",
        TEXT | AXES,
        QWEN_VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        {"image_token_id": IMAGE, "video_token_id": 46},
        patches,
        "mm_token_type_ids",
        has_axes=True,
    ),
    "Llama 4": Family(
        "Llama4",
        TEXT | LLAMA4,
        VISION
        | {
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "intermediate_size": 64,
            "pixel_shuffle_ratio": 0.5,
        },
        {"image_token_index": IMAGE},
        pixels,
    ),
    "Gemma 4": Family(
        "Gemma4",
        TEXT
        | LAYERS
        | {
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "global_head_dim": 8,
        },
        VISION | {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2},
        {"image_token_id": IMAGE, "audio_config": None},
        placed,
        "mm_token_type_ids",
    ),
}


def small_model(name: str) -> Any:
    """The same weights at every call; attention as transformers writes it out."""
    family = deepcopy(FAMILIES[name])  # configs write into the dicts that they are made of
    config = getattr(transformers, f"{family.name}Config")(
        text_config=family.text, vision_config=family.vision, **family.options
    )
    torch.manual_seed(0)
    # Llama 4 of transformers 5.24.0 asks its text model for images, so that no forward of it works.
    MoeCausalLMOutputWithPast.image_outputs = None
    model = getattr(transformers, f"{family.name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for x in model.parameters():  # biases, norms and sinks would hide behind 0 and 1
            x.copy_(torch.where(x == 0, 0.0, x) + 0.1 * torch.randn_like(x))
    model.set_attn_implementation("eager")
    return model.float().eval()


CASES = ("one image", "several images", "text only", "padded left", "padded right", "packed")


def batch_of(name: str, case: str, seed: int = 1) -> dict[str, Tensor]:
    """Two rows of text and images; labels are the tokens, but for images and padding."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    tokens = torch.randint(2, VOCABULARY - 3, (2, SEQ_LEN), generator=generator)
    index = torch.arange(SEQ_LEN).expand(2, -1)
    # The first token of each image, by row: two of a row are neighbours in one case.
    begins = {"one image": [[3], [7]], "text only": [[], []]}
    places = begins.get(case, [[2, 16], [9]])
    for row, firsts in zip(tokens, places, strict=True):
        for first in firsts:
            row[first : first + TOKENS_OF_IMAGE] = IMAGE
    is_image = tokens == IMAGE
    batch: dict[str, Tensor] = {"input_ids": tokens}
    labels = tokens.masked_fill(is_image, -100)
    if case.startswith("padded"):
        held = index >= torch.tensor([[0], [6]])
        if case == "padded right":
            held = index < torch.tensor([[SEQ_LEN], [24]])
        batch |= {"input_ids": tokens * held, "attention_mask": held.long()}
        labels = labels.masked_fill(~(held & held.roll(1, -1)), -100)
    if case != "text only":
        batch |= family.images([len(firsts) for firsts in places])
    if family.types == "token_type_ids" and family.name == "PaliGemma":
        batch[family.types] = (index >= torch.tensor([[12], [16]])).long()
    elif family.types:
        batch[family.types] = is_image.long()
    if case == "packed":
        batch["position_ids"] = packed_positions(index, is_image, family.has_axes)
    return batch | {"labels": labels}


def packed_positions(index: Tensor, is_image: Tensor, has_axes: bool) -> Tensor:
    """Documents that begin at other tokens in each row; of four axes if a model has them."""
    starts = torch.tensor([[9], [6]])
    text = torch.where(index < starts, index, index - starts)
    if not has_axes:
        return text
    # Height and width of an image tell its tokens apart, time does not.
    return torch.stack([text, *(text + n * (is_image & (index % 2 == n % 2)) for n in range(3))])
