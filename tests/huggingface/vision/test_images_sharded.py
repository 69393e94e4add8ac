"""Images sharded over the ranks: loss and gradients as of one process, and when it pays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.huggingface.vision.image_sharding import (
    EmbeddingSize,
    Images,
    ImageSharding,
    Share,
)
from tests.dense import largest
from tests.huggingface.planned import gradient_errors, shard_weights
from tests.huggingface.vision.test_images import planned
from tests.multimodal import FAMILIES, batch_of, small_model
from tests.pool import on_ranks
from tests.results import difference, of_first_rank, results_of

WHOLE = ("SmolVLM",)
"""Rows of images, of which those of zeros are none, are not cut."""
CASES = {"several images": 3, "one image": 2, "packed": 3, "padded right": 3}
"""Images of a batch: of three one rank gets two, and one of four ranks none."""


def image_sharding_of(model: Any) -> ImageSharding:
    found = [vars(x).get("context_parallel_images") for x in model.modules()]
    return next(x for x in found if x is not None)


def num_run(model: Any, family: str, case: str) -> int:
    """How many images this rank ran; loss and gradients are those of the stock model."""
    batch = batch_of(family, case)
    expected = of_first_rank(lambda: results_of(small_model(family), batch))
    assert difference(results_of(model, batch), expected)[0] < 1e-5, case
    return image_sharding_of(model).num_run


def check(family: str, cases: Iterable[str]) -> None:
    # Contiguous: one rank runs an image whose tokens another has.
    model, counts = planned(family, "contiguous", deal_images=True), [0] * dist.get_world_size()
    for case in cases:
        dist.all_gather_object(counts, num_run(model, family, case))
        assert sum(counts) == (0 if family in WHOLE else CASES[case]), (case, counts)


@pytest.mark.parametrize(
    ("family", "world_size"), [*((x, 2) for x in FAMILIES), ("Gemma 3", 4), ("Qwen3-VL", 4)]
)
@on_ranks()
def test_equals_one_process(family: str) -> None:
    check(family, ["several images"])


@pytest.mark.needs("--all-images")
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
@on_ranks()
def test_all_cases(family: str) -> None:
    check(family, CASES)


@on_ranks(2)
def test_one_image_on_two_ranks() -> None:
    """The second row alone, which has one image: every rank runs it."""
    model, stock = planned("Gemma 3", deal_images=True), small_model("Gemma 3")
    batch = {name: x[-1:] for name, x in batch_of("Gemma 3", "several images").items()}
    error = difference(results_of(model, batch), results_of(stock, batch))[0]
    assert error < 1e-5
    assert image_sharding_of(model).num_run == 1


@on_ranks(2)
def test_images_that_mix_in_the_encoder() -> None:
    """An encoder that mixes images is found, and runs whole on every rank."""
    kind = type(small_model("Gemma 3").model)
    plain = kind.get_image_features

    def mixing(self: Any, pixel_values: Tensor, **kwargs: Any) -> Any:
        output = plain(self, pixel_values, **kwargs)
        output.pooler_output = output.pooler_output + output.pooler_output.mean(0)
        return output

    with mock.patch.object(kind, "get_image_features", mixing):
        model = planned("Gemma 3", "contiguous", deal_images=True)
        assert num_run(model, "Gemma 3", "several images") == 3


@on_ranks(4)
def test_a_rank_without_an_image_under_fsdp() -> None:
    model, stock = planned("Gemma 3", deal_images=True), small_model("Gemma 3")
    shard_weights(model, model.model.vision_tower.encoder.layers)
    batch = batch_of("Gemma 3", "several images")
    for x in (model, stock):
        x(**batch, use_cache=False).loss.backward()
    assert image_sharding_of(model).num_run == (1, 0, 1, 1)[dist.get_rank()]
    errors = gradient_errors(model, stock)
    assert len(errors) > 20
    assert largest(errors) < 1e-5, errors


PATCHES, WIDTH = 256, 4 * 1024
"""Of an image, and bytes of a token's embedding."""


@pytest.mark.parametrize(
    ("sizes", "num_weights", "trains", "is_sharded"),
    [
        # Half of 512 patches saves 2 * 256 flops for each weight, and 2 * 512 * 4096 bytes travel,
        # worth 8,000 flops each.
        ((1, 1), 65_500_000, False, False),
        ((1, 1), 65_600_000, False, True),
        ((1, 1), 21_800_000, True, False),  # with its backward, it saves three times as much
        ((1, 1), 21_900_000, True, True),
        ((1, 1, 1), 98_200_000, False, False),  # a third is saved only
        ((1, 1, 1), 98_400_000, False, True),
    ],
)
def test_images_are_sharded_where_it_pays(
    sizes: tuple[int, ...], num_weights: int, trains: bool, is_sharded: bool
) -> None:
    image_sharding: Any = ImageSharding(None, num_weights, 1, None)  # type: ignore[arg-type]
    image_sharding._embeddings = EmbeddingSize(PATCHES, WIDTH)  # type: ignore[arg-type]
    images: Any = Images.of({"pixel_values": torch.empty(len(sizes), 3, 16, 16)})
    assert images.sizes == sizes
    with torch.set_grad_enabled(trains):
        assert image_sharding._pays(images, Share.of(sizes, 0, 2)) == is_sharded


@pytest.mark.parametrize(
    ("deals", "reason"),
    [(True, "Gemma3TextModel has none; leave deal_images out"), (1.5, "True, False or None, got")],
)
def test_refused_without_images(deals: Any, reason: str) -> None:
    text = small_model("Gemma 3").model.language_model
    assert context_parallel_plan(text, deal_images=False)
    with pytest.raises(ValueError, match=reason):
        context_parallel_plan(text, deal_images=deals)
