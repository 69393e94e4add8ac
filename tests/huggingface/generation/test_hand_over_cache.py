"""Prompts prefilled by some ranks, and generated from by others: the tokens of the stock model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel_plans.huggingface import ContextParallelCache, hand_over_cache
from tests.huggingface.generation.generating import exact_softmax, generate, stock, tokens
from tests.huggingface.planned import under_plan
from tests.pool import on_ranks
from tests.results import of_first_rank

GROUPS = [((0,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3), (1, 2)), ((0, 1, 2), (3,))]
FAMILIES = ("Llama", "Gemma 3", "DeepSeek-V3", "Qwen3-Next", "DeepSeek-V3.2")


def on(ranks: tuple[int, ...], family: str, layout: str, **options: Any) -> Any:
    """The model under a plan over these ranks, `None` on others; all ranks must call it."""
    mesh = DeviceMesh("cpu", [*ranks])
    if mesh.get_coordinate() is None:
        return None
    return under_plan(stock(family), layout, mesh=mesh, **options)


@torch.no_grad()
def handed_over(models: list[Any], prompt: torch.Tensor, mesh: DeviceMesh) -> Any:
    """The cache of the second group, after the first one has prefilled all but the last token."""
    caches = [None if x is None else ContextParallelCache(x) for x in models]
    if models[0] is not None:
        models[0](prompt[:, :-1], cache=caches[0])
    hand_over_cache(*caches, mesh)
    return caches[1]


def stock_tokens(family: str, prompt: torch.Tensor) -> torch.Tensor:
    with exact_softmax():
        return generate(stock(family), inputs=prompt).sequences


@pytest.mark.parametrize("num_groups", [1, pytest.param(4, marks=pytest.mark.repeats)])
@on_ranks(4)
def test_tokens_are_those_of_the_stock_model(num_groups: int) -> None:
    """Each family over one of the groups in turn, or over all."""
    mesh = init_device_mesh("cpu", (4,))
    for number, family in enumerate(FAMILIES, 2):
        prompt = tokens(29)
        expected = of_first_rank(partial(stock_tokens, family, prompt))
        for ranks in [*GROUPS, *GROUPS][number % 4 :][:num_groups]:
            models = [on(x, family, "zigzag") for x in ranks]
            cache = handed_over(models, prompt, mesh)
            if cache is not None:
                found = generate(models[1], inputs=prompt, cache=cache).sequences
                assert torch.equal(found, expected), (family, ranks)


@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
@on_ranks(4)
def test_eight_bits_stay(family: str) -> None:
    """What was rounded stays so: the logits are those of the ranks that have prefilled."""
    mesh, options = init_device_mesh("cpu", (4,)), {"cache_dtype": "int8"}
    prompt = tokens(64 * 3 + 6, rows=1)
    first = on((0, 1), family, "whole_blocks:64", **options)
    models = [first, on((3,), family, "whole_blocks:64", **options)]
    cache, logits = handed_over(models, prompt, mesh), torch.empty(0)
    with torch.no_grad():
        if first is not None:
            alone = ContextParallelCache(first)
            first(prompt[:, :-1], cache=alone)
            logits = first(prompt[:, -1:], cache=alone).logits
        elif cache is not None:
            logits = models[1](prompt[:, -1:], cache=cache).logits
    told: list[Any] = [None] * 4
    dist.all_gather_object(told, logits)
    torch.testing.assert_close(told[3], told[0], atol=1e-12, rtol=1e-12)


@on_ranks(2)
def test_what_does_not_fit() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    models = on((0,), "Llama", "zigzag"), on((1,), "Llama", "zigzag")
    other = on((1,), "Gemma 3", "zigzag")
    cache = handed_over([*models], tokens(9), mesh)
    source = None if rank else ContextParallelCache(models[0])
    with pytest.raises(ValueError, match="to an empty one: a target has 8 tokens"):
        hand_over_cache(source, cache, mesh)
    with pytest.raises(ValueError, match="to an empty one: no rank has a source"):
        hand_over_cache(None, None if cache is None else ContextParallelCache(models[1]), mesh)
    target = None if other is None else ContextParallelCache(other)
    with pytest.raises(ValueError, match="hand over caches of the same model"):
        hand_over_cache(source, target, mesh)
