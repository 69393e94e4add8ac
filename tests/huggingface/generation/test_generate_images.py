"""`generate` of models that read images gives the tokens of the stock model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache

from dtensor_ring import RingError
from parallel_plans.huggingface import ContextParallelCache
from tests.huggingface.generation.generating import (
    CACHE,
    check_bits,
    check_generated,
    decode_messages,
    exact_softmax,
    generate,
)
from tests.huggingface.planned import under_plan
from tests.multimodal import FAMILIES, IMAGE, batch_of, small_model
from tests.pool import Pool, on_ranks

NUM_NEW = 4
OF_IMAGES = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "one image": ("one image", {}),
    "several images": ("several images", {}),
    "text alone": ("text only", {}),
    "left padded": ("padded left", {}),
    "no cache": ("padded left", {"use_cache": False}),
    "sampled": ("several images", {"do_sample": True, "temperature": 2.0}),
    "beams": ("padded left", {"num_beams": 2}),
    "two of each": ("several images", {"num_return_sequences": 2, "do_sample": True}),
    "prompt lookup": ("one image", {"prompt_lookup_num_tokens": 3}),
    "hidden states": ("several images", {"output_hidden_states": True}),
}
"""What a model is called with, and how."""
ONE_ROW = ("prompt lookup",)
STOCK_FAILS = {("Llama 4", "beams"), ("Llama 4", "two of each")}
"""It does not repeat the images that it encoded for each of the rows."""


def stock(family: str) -> Any:
    """In float64, so that rounding decides no token."""
    return small_model(family).double()


def planned(family: str, layout: str = "zigzag", **options: Any) -> Any:
    return under_plan(stock(family), layout, **options)


def prompt(family: str, case: str, rows: int = 2) -> dict[str, Tensor]:
    """What a model is called with, with pixels in float64; rows have as much of each argument."""
    batch = {name: x for name, x in batch_of(family, case).items() if name != "labels"}
    batch = {name: x[: len(x) * rows // 2] for name, x in batch.items()}
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def check_ways(family: str, ways: tuple[str, ...], layout: str, deals: bool | None = None) -> None:
    """The same tokens as the stock model, and logits of the same bits on all ranks."""
    ours, theirs = planned(family, layout, deal_images=deals), stock(family)
    for way in (x for x in ways if (family, x) not in STOCK_FAILS):
        case, options = WAYS[way]
        options = prompt(family, case, 1 if way in ONE_ROW else 2) | options
        options |= {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW}
        options["suppress_tokens"] = [IMAGE, IMAGE - 1]  # without a cache it would want an image
        found = generate(ours, **options)
        with exact_softmax():
            expected = generate(theirs, **options)
        check_generated(found, expected, way, 1e-5)


@pytest.mark.parametrize("family", ["PaliGemma 2", "Qwen2.5-VL", "Llama 4"])
def test_tokens_after_images(pool: Pool, family: str) -> None:
    """A prefix that sees itself, positions of several axes, chunks."""
    pool.run(2, check_ways, family, ("left padded",), "zigzag")


@pytest.mark.needs("--all-generations")
@pytest.mark.parametrize(
    ("family", "world_size", "layout"),
    [
        *((family, 2, layout) for family in FAMILIES for layout in ("zigzag", "balanced")),
        *((family, 3, "contiguous") for family in FAMILIES),
    ],
)
def test_all_ways(pool: Pool, family: str, world_size: int, layout: str) -> None:
    deals = True if world_size > 2 else None
    pool.run(world_size, check_ways, family, tuple(WAYS), layout, deals)


SAMPLE = ("beams", "two of each", "no cache", "prompt lookup")


@pytest.mark.parametrize("family", ["Gemma 3", "Qwen3-VL"])
def test_ways_to_generate(pool: Pool, family: str) -> None:
    """Each rank runs the encoder on its images only."""
    pool.run(3, check_ways, family, SAMPLE, "zigzag", True)


TURNS = (14, 8, 1, 6)
"""Tokens of each forward: two images of three, the third, text, text."""
IMAGES_OF_TURNS = ([0, 2], [1])
"""The first row has two, the second one."""


@torch.no_grad()
def check_turns(family: str, decode_tokens: int) -> None:
    """Logits of one forward of the whole, though an image comes in a later turn."""
    ours, theirs, batch = planned(family), stock(family), prompt(family, "several images")
    if FAMILIES[family].has_axes:
        known = {name: batch[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
        batch["position_ids"] = theirs.model.get_rope_index(**known)[0]
    with exact_softmax():
        expected = theirs(**batch, use_cache=False).logits
    images = {name: batch.pop(name) for name in OF_IMAGES if name in batch}
    cache, end, parts = ContextParallelCache(ours, decode_tokens=decode_tokens), 0, []
    for turn, num_tokens in enumerate(TURNS):
        assert cache.is_initialized == bool(end)  # PaliGemma asks
        begin, end = end, end + num_tokens
        # Which tokens are of images is said of all that a mask has, the others of new tokens.
        new = {
            name: x[..., 0 if name.endswith("type_ids") else begin : end]
            for name, x in batch.items()
        }
        if turn < len(IMAGES_OF_TURNS):
            new |= {name: _some(x, IMAGES_OF_TURNS[turn]) for name, x in images.items()}
        parts.append(ours(**new, cache=cache).logits)
        assert cache.get_seq_length() == end
    check_bits(torch.cat(parts, 1))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-6)


def _some(x: Tensor, which: list[int]) -> Tensor:
    """Those of three images."""
    parts = x.chunk(3)
    return torch.cat([parts[number] for number in which])


IN_TURNS = tuple(name for name in FAMILIES if name not in ("PaliGemma", "PaliGemma 2", "SmolVLM"))
"""The others need a prefix in one turn (PaliGemma), or as many images in each row (SmolVLM)."""
SOME_TURNS = [
    {"family": "Gemma 3", "decode_tokens": 4},
    {"family": "Qwen3-VL", "decode_tokens": 64},
]


@pytest.mark.needs("--all-generations", but=lambda **case: case in SOME_TURNS)
@pytest.mark.parametrize("decode_tokens", [64, 4])
@pytest.mark.parametrize("family", IN_TURNS)
def test_an_image_in_a_later_turn(pool: Pool, family: str, decode_tokens: int) -> None:
    pool.run(3, check_turns, family, decode_tokens)


@on_ranks(2)
def test_text_after_an_image() -> None:
    """A second turn of text alone has positions of one axis, `(1, B, S)`: they are of all three."""
    ours, theirs = planned("Qwen2.5-VL"), stock("Qwen2.5-VL")
    caches = ContextParallelCache(ours, decode_tokens=8), DynamicCache(config=theirs.config)
    batch = prompt("Qwen2.5-VL", "one image", rows=1)
    of_images = {name: batch.pop(name) for name in OF_IMAGES if name in batch}
    for num_tokens in (0, 20, 3):  # more, one of them sharded, and few
        said = torch.full((1, num_tokens), 7)
        batch["input_ids"] = torch.cat([batch["input_ids"], said], 1)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        types = batch["mm_token_type_ids"]
        added = types.new_zeros(1, batch["input_ids"].shape[1] - types.shape[1])
        batch["mm_token_type_ids"] = torch.cat([types, added], 1)
        options = batch | of_images | {"suppress_tokens": [IMAGE, IMAGE - 1]}
        found = generate(ours, **options, cache=caches[0])
        with exact_softmax():
            expected = generate(theirs, **options, **{CACHE: caches[1]})
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
        batch["input_ids"], of_images = found.sequences, {}


@pytest.mark.parametrize("what", ["tokens given as agree", "pixel_values"])
@on_ranks(2)
@torch.no_grad()
def test_ranks_that_differ(what: str) -> None:
    """They bring other images; in a later turn another token, or other images of one."""
    ours, batch, rank = planned("Gemma 3"), prompt("Gemma 3", "one image"), dist.get_rank()
    fewer = batch | {"pixel_values": batch["pixel_values"][rank:]}
    with pytest.raises(ValueError, match="differ in pixel_values"):
        generate(ours, **fewer)
    cache = ours(**batch, use_cache=True)[CACHE]
    later = {"input_ids": batch["input_ids"][:, :1] + rank}
    if what == "pixel_values":  # of a turn that is not sharded
        later = fewer | {"token_type_ids": batch["token_type_ids"].repeat(1, 2)}
    with pytest.raises(RingError, match=f"differ in {what}"):
        ours(**later, cache=cache)


@on_ranks(2)
def test_refused_on_every_rank() -> None:
    """What the cache of text refuses; the model goes on."""
    ours, batch = planned("Gemma 3"), prompt("Gemma 3", "one image")
    with pytest.raises(ValueError, match="cache_implementation='static' is not"):
        generate(ours, **batch, cache_implementation="static")
    with pytest.raises(ValueError, match=r"under torch.no_grad\(\)"):
        ours(**batch, use_cache=True)
    with torch.no_grad():
        with pytest.raises(ValueError, match=f"{CACHE} is a DynamicCache"):
            ours(**batch, cache=DynamicCache())
        cache = ContextParallelCache(ours)
        with pytest.raises(ValueError, match="labels is not supported together with a cache"):
            ours(**batch, labels=batch["input_ids"], cache=cache)
    asked = {"max_new_tokens": 2, "min_new_tokens": 2}
    assert generate(ours, **batch, **asked).sequences.shape[1] == batch["input_ids"].shape[1] + 2


@on_ranks(2)
def test_one_message_for_each_full_layer() -> None:
    for family, expected in {"Gemma 3": 1, "Qwen3-VL": 2}.items():
        found = decode_messages(planned(family), prompt(family, "one image"))
        assert found == [expected] * 3, family
