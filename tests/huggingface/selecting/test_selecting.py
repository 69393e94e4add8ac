"""Models whose layers choose their keys equal the stock model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from parallel_plans.huggingface import restore_model
from parallel_plans.huggingface.selecting.indexers import indexers_of, selecting_layers
from parallel_plans.huggingface.selecting.selection import has_latents
from tests.families import (
    BESIDE_POOLS,
    CHOOSES_BLOCKS,
    CHOOSES_POOLS,
    SELECTING,
    VOCABULARY,
    small_model,
)
from tests.huggingface.planned import under_plan
from tests.huggingface.test_families import check_family
from tests.huggingface.test_families_trained import CHECKPOINTING, check_steps
from tests.pool import on_ranks

LAYOUTS = ("zigzag", "contiguous")
OF_ROWS = {**CHOOSES_BLOCKS, **CHOOSES_POOLS, **BESIDE_POOLS}


def every_family() -> list[Any]:
    """Each family over one layout and number of ranks, in turn; the others repeat these."""
    worlds = list(product((2, 4), LAYOUTS))
    often = {(family, *worlds[number % 4]) for number, family in enumerate(SELECTING)}
    return [
        pytest.param(family, *world, marks=() if (family, *world) in often else pytest.mark.repeats)
        for family, world in product(SELECTING, worlds)
    ]


@pytest.mark.parametrize(("family", "world_size", "layout"), every_family())
@on_ranks()
def test_family_equals_the_stock_model(family: str, layout: str) -> None:
    check_family(family, layout)


# Hy 4 has layers that share an index, and all kinds of this plan; `--all-cases` has the others.
TRAINED = {("Hy 4", "selective"), ("MiniMax M3", "full")}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*x, marks=() if x in TRAINED else pytest.mark.repeats)
        for x in product((*SELECTING, *OF_ROWS), CHECKPOINTING)
    ],
)
@on_ranks(4)
def test_steps_of_fsdp_equal_one_process(family: str, name: str) -> None:
    check_steps(family, CHECKPOINTING[name])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(x, marks=() if x in ("GLM-5", *OF_ROWS) else pytest.mark.repeats)
        for x in (*SELECTING, *OF_ROWS)
    ],
)
@on_ranks(2)
def test_models_in_16_bits(family: str) -> None:
    """Rounding chooses other keys here and there, so only the loss is near."""
    tokens = torch.randint(2, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    losses = []
    for make in (small_model, lambda x: under_plan(small_model(x))):
        model = make(family).bfloat16()
        model.set_experts_implementation("eager")
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)
        losses.append(loss.item())
        use_cache = family not in BESIDE_POOLS
        model.eval().generate(tokens, max_new_tokens=3, do_sample=False, use_cache=use_cache)
    stock, ours = losses
    assert ours == pytest.approx(stock, rel=0.03)


@on_ranks(1)
def test_restored_model_is_the_stock_model() -> None:
    model = under_plan(small_model("GLM-5"))
    layers = selecting_layers(model)
    assert len(layers) == 3
    assert all(has_latents(x) for x in layers)
    restore_model(model)
    assert not any(has_latents(x) for x in layers)
    assert not any("forward" in vars(x) for x in indexers_of(model))
    tokens = torch.full((1, 7), VOCABULARY - 1)
    torch.testing.assert_close(model(tokens).logits, small_model("GLM-5")(tokens).logits)
