"""Images for small models of any type, made by what their code and configs say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUM_IMAGES = 2
"""One in each row of a batch."""
IMAGE_TOKENS = ("image_token_id", "image_token_index")
MOST_PATCHES = 2000
"""Of an image: an encoder whose attention is written out has memory for no more."""
TYPES = ("mm_token_type_ids", "token_type_ids")


class Images(NamedTuple):
    """What a model is called with beside tokens."""

    inputs: dict[str, Tensor]
    num_tokens: int
    """That stand for one image."""
    token: int
    """Its id."""
    types: str | None
    """The argument that says which tokens are of images."""


def images_of(model: Any) -> Images | None:
    """Two images, as the model takes them; `None` if nobody knows how."""
    tokens = [getattr(model.config, name, None) for name in IMAGE_TOKENS]
    token = next((x for x in tokens if x is not None), None)
    vision = getattr(model.config, "vision_config", None)
    if not isinstance(token, int) or vision is None or not hasattr(model, "get_image_features"):
        return None
    names = signature(type(model).forward).parameters
    types = next((name for name in TYPES if name in names), None)
    if "paligemma" in model.config.model_type:
        types = None  # there they tell a prompt from its answer
    for inputs in _candidates(vision, set(names)):
        with suppress(Exception), torch.no_grad():  # whatever its code raises
            known = signature(model.get_image_features).parameters
            of_images = {name: x for name, x in inputs.items() if name in known}
            count = _num_tokens(model.get_image_features(**of_images, return_dict=True), model)
            if count:
                return Images(inputs, count, token, types)
    return None


def _candidates(vision: Any, names: set[str]) -> Iterator[dict[str, Tensor]]:
    """What two images may look like to a model with arguments of those names."""
    patch, size = (_first(getattr(vision, x, None)) for x in ("patch_size", "image_size"))
    patch = patch or 14
    generator = torch.Generator().manual_seed(1)
    if "image_grid_thw" in names:
        side = 2 * getattr(vision, "spatial_merge_size", 1)
        depth = getattr(vision, "temporal_patch_size", 1)
        pixels = torch.randn(NUM_IMAGES * side**2, 3 * depth * patch**2, generator=generator)
        grid = torch.tensor([[1, side, side]] * NUM_IMAGES)
        yield {"pixel_values": pixels, "image_grid_thw": grid}
        # Patches as small images.
        small = pixels.view(len(pixels), 3 * depth, patch, patch)
        yield {"pixel_values": small, "image_grid_thw": grid}
    if "image_position_ids" in names:
        side = 2 * getattr(vision, "pooling_kernel_size", 1)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        pixels = torch.rand(NUM_IMAGES, side**2, 3 * patch**2, generator=generator)
        yield {"pixel_values": pixels, "image_position_ids": places.expand(NUM_IMAGES, -1, -1)}
    sides = dict.fromkeys(x for x in (size, 4 * patch) if x)
    for side in (x for x in sides if (x // patch) ** 2 <= MOST_PATCHES):
        pixels = torch.randn(NUM_IMAGES, 3, side, side, generator=generator)
        yield {"pixel_values": pixels}
        if "image_sizes" in names:
            yield {"pixel_values": pixels, "image_sizes": torch.full((NUM_IMAGES, 2), side)}
            # Tiles of an image, and one of the whole of it.
            for num_tiles in (2, 3):
                tiles = pixels[:, None].expand(-1, num_tiles, -1, -1, -1).contiguous()
                yield {"pixel_values": tiles, "image_sizes": torch.full((NUM_IMAGES, 2), side)}
        if "pixel_attention_mask" in names:
            yield {"pixel_values": pixels[:, None]}
    if "image_grid_thw" in names:
        # Squares of patches, one for each token, whose channels are last; the grid counts tokens.
        edge = patch * getattr(vision, "spatial_merge_size", 1)
        pixels = torch.rand(NUM_IMAGES * 4, edge, edge, 3, generator=generator)
        yield {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]] * NUM_IMAGES)}


def _first(x: Any) -> int | None:
    return x[0] if isinstance(x, (list, tuple)) else x


def _num_tokens(features: Any, model: Any) -> int:
    """How many tokens stand for each of the images; 0 if not equally many for each."""
    found = getattr(features, "pooler_output", None)
    if found is None:
        found = features.last_hidden_state
    width = model.get_input_embeddings().weight.shape[1]
    parts = found if isinstance(found, (list, tuple)) else [found]
    total = sum(x.numel() for x in parts)
    return 0 if total % (NUM_IMAGES * width) else total // (NUM_IMAGES * width)
