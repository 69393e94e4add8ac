"""A Hugging Face Llama under its plan equals the stock model, and calls that this accepts do."""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import pytest
import torch
from parts.small_models import MODELS as DEMO_MODELS
from parts.small_models import small_model as demo_model
from parts.text import read_standard_library
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves
from train_hf import average_gradients, batch_of, inputs_of
from transformers import Cache

from dtensor_ring import unshard_sequence
from parallel_plans.huggingface import ContextParallelCache
from parallel_plans.huggingface.probing.eligibility import check_model
from tests import families, multimodal
from tests.dense import largest
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import relative, under_plan
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


def parallel_model(layout: str, seq_len: int, **options: Any) -> Any:
    return under_plan(demo_model("llama", seq_len), layout, **options)


def without_layers(model: Any, num_left: int) -> Any:
    """The model with its first layers only: a compiler takes its time for each."""
    del model.model.layers[num_left:]
    return model


# A graph has the layout as a name: what is compiled is the same for all. Gradients of all layouts
# are in test_outputs_of_all_input_forms.
REPEATED = [
    pytest.param(*pair, marks=pytest.mark.repeats)
    for pair in product(("contiguous", "striped"), (None, "inductor"))
]


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        ("zigzag", None),
        # That graphs give what eager models do is in test_families, what Inductor makes of
        # them in tests/ops/test_compile.
        *(pytest.param("zigzag", x, marks=pytest.mark.repeats) for x in ("aot_eager", "inductor")),
        *REPEATED,
    ],
)
@on_ranks(2)
def test_trains_as_one_process(layout: str, backend: str | None) -> None:
    """Per step of the demo: difference of the losses, and the largest of a gradient, relative.

    By SGD: Adam's first steps turn rounding in a gradient near zero into a full step.
    """
    steps = 4
    seq_len = 192
    options = argparse.Namespace(seq_len=seq_len, batch=2)
    ring, stock = (
        without_layers(model, 1 if backend else 4)
        for model in (parallel_model(layout, seq_len), demo_model("llama", seq_len))
    )
    forward = torch.compile(ring, fullgraph=True, backend=backend) if backend else ring
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.03) for model in (ring, stock)]
    text, differences = read_standard_library(), []
    for step in range(steps):
        tokens = batch_of(text, step, options)
        losses = [model(input_ids=tokens, labels=tokens).loss for model in (forward, stock)]
        for loss in losses:
            loss.backward()
        average_gradients(ring)
        pairs = zip(ring.parameters(), stock.parameters(), strict=True)
        gradient = largest(relative(ours.grad, theirs.grad) for ours, theirs in pairs)
        differences.append((abs(losses[0].item() - losses[1].item()), gradient))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for step, (loss, gradient) in enumerate(differences):
        assert loss < 1e-5, f"step {step}: loss differs by {loss}"
        assert gradient < 1e-5, f"step {step}: a gradient differs by {gradient}"


@pytest.mark.parametrize(
    ("layout", "seq_len"), [("zigzag", 37), ("contiguous", 7), ("striped", 12)]
)
@on_ranks(4)
def test_outputs_of_all_input_forms(layout: str, seq_len: int) -> None:
    """Outputs, labels that are masked, and gradients through the logits instead of the loss."""
    ring, stock = parallel_model(layout, seq_len), demo_model("llama", seq_len)
    tokens = torch.randint(0, 256, (2, seq_len), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 2:7] = -100
    ones = torch.ones_like(tokens)
    positions = torch.arange(seq_len).expand(2, -1)
    embeds = stock.get_input_embeddings()(tokens).detach()
    for case in (
        {"input_ids": tokens, "labels": labels},
        {"input_ids": tokens, "labels": labels, "num_items_in_batch": torch.tensor(7)},
        {"input_ids": tokens, "labels": labels, "output_hidden_states": True},
        {"inputs_embeds": embeds, "attention_mask": ones, "position_ids": positions},
    ):
        ours, theirs = ring(**case, output_logits=True), stock(**case)
        assert isinstance(ours.logits, DTensor)
        assert ours.logits.placements == (Shard(1),)
        torch.testing.assert_close(unshard_sequence(ours.logits, 1), theirs.logits)
        if theirs.loss is not None:
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)
        for our_state, state in zip(
            ours.hidden_states or (), theirs.hidden_states or (), strict=True
        ):
            torch.testing.assert_close(unshard_sequence(our_state, 1), state)
    positional = ring(tokens).logits
    unshard_sequence(positional, 1).square().mean().backward()
    stock(tokens).logits.square().mean().backward()
    average_gradients(ring)
    for ours, theirs in zip(ring.parameters(), stock.parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < 1e-5


def test_models_of_the_demo() -> None:
    for model in DEMO_MODELS:
        options = argparse.Namespace(model=model, packed=True, seq_len=64, batch=1)
        batch = inputs_of(torch.arange(128), 0, options)
        loss = demo_model(model, 64)(**batch, use_cache=False).loss
        assert 3 < loss.item() < 9, f"{model}: about the logarithm of 256 bytes"
        check_model(demo_model(model, 64))
