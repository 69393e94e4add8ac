"""Calls that the stock model accepts are right under the plan, in what they return, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves
from transformers import Cache

from parallel_plans.huggingface import ContextParallelCache
from tests import families, multimodal
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.pool import on_ranks

LABELS, CACHE, TUPLE = {"labels": None}, {"use_cache": True}, {"return_dict": False}
CALLS: dict[str, dict[str, Any]] = {
    "a cache beside labels": LABELS | CACHE,
    "a tuple": TUPLE,
    "a tuple with labels": LABELS | TUPLE | {"output_hidden_states": True},
    "a tuple beside labels and a cache": LABELS | TUPLE | CACHE,
    "positions of a cache": LABELS | {"cache_position": None},
    "a tuple with a cache": TUPLE | CACHE | {"cache_position": None},
}
MODELS = ("Llama", "LFM2", "Qwen2.5-VL")
"""Attention, layers with a state beside it, and images around it."""


def model_and_batch(family: str) -> tuple[Any, dict[str, Tensor]]:
    if family in multimodal.FAMILIES:
        batch = multimodal.batch_of(family, "one image")
        return multimodal.small_model(family), batch
    tokens = torch.arange(2, 28).view(2, 13)
    return families.small_model(family), {"input_ids": tokens}


def called(model: Any, batch: dict[str, Any], call: dict[str, Any]) -> Any:
    """What a call returns, recorded where it has a loss."""
    tokens = batch["input_ids"]
    given = {"labels": tokens, "cache_position": torch.arange(tokens.shape[1])}
    batch = {name: x for name, x in batch.items() if name != "labels"}
    with torch.set_grad_enabled("labels" in call):
        return model(**batch, **{name: given.get(name, x) for name, x in call.items()})


@pytest.mark.parametrize("family", MODELS)
@on_ranks(2)
def test_calls_of_the_stock_model(family: str) -> None:
    stock, batch = model_and_batch(family)
    ours, _ = model_and_batch(family)
    under_plan(ours, unshard_outputs=True)
    for name, call in CALLS.items():
        caches = call.get("use_cache") and "labels" not in call
        if caches and family in families.HYBRIDS:  # its states have no cache
            continue
        expected = called(stock, batch, call | {"use_cache": bool(caches)})
        found = called(ours, batch, call)
        assert type(found) is type(expected), name
        assert len(found) == len(expected) or not isinstance(found, tuple), name
        if caches:
            (place,) = (i for i, x in enumerate(expected) if isinstance(x, Cache))
            assert isinstance(found[place], ContextParallelCache), name
            found, expected = (x[:place] + x[place + 1 :] for x in (found, expected))
        if "return_dict" not in call:  # what it has is known by name
            found, expected = found.loss, expected.loss
        torch.testing.assert_close(tree_leaves(found), tree_leaves(expected), atol=1e-4, rtol=1e-4)


TOKENS = torch.arange(2, 34).view(2, 16) % VOCABULARY
PACKED = torch.arange(16).repeat(2, 1) % 10  # two documents in each row


@pytest.mark.parametrize(("family", "strategy"), [("Llama", "ulysses"), ("Qwen3.5", None)])
@on_ranks(2)
def test_gradients(family: str, strategy: str | None) -> None:
    model = small_model(family)
    under_plan(model, strategy=strategy)
    batch = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": PACKED}
    model(**batch).loss.backward()
    expected = {name: x.grad for name, x in model.named_parameters()}
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (), batch).loss

    found = grad(loss)(parameters)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@on_ranks(2)
def test_gradients_of_samples() -> None:
    """Each row by itself, in a model in training, whose forward draws the state of a rank."""
    model = under_plan(small_model("Llama")).train()
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        batch = {"input_ids": row[None], "labels": row[None]}
        return functional_call(model, parameters, (), batch).loss

    found = vmap(grad(loss), (None, 0))(parameters, TOKENS)
    for number, row in enumerate(TOKENS):
        expected = grad(loss)(parameters, row)
        of_row = {name: x[number] for name, x in found.items()}
        torch.testing.assert_close(of_row, expected, atol=1e-6, rtol=1e-5)
