"""A Hugging Face Llama under its plan equals the stock model."""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import pytest
import torch
from parts.small_models import MODELS, small_model
from parts.text import read_standard_library
from torch.distributed.tensor import DTensor, Shard
from train_hf import average_gradients, batch_of, inputs_of

from dtensor_ring import unshard_sequence
from parallel_plans.huggingface.probing.eligibility import check_model
from tests.dense import largest
from tests.huggingface.planned import relative, under_plan
from tests.pool import on_ranks


def parallel_model(layout: str, seq_len: int, **options: Any) -> Any:
    return under_plan(small_model("llama", seq_len), layout, **options)


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
        for model in (parallel_model(layout, seq_len), small_model("llama", seq_len))
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
    ring, stock = parallel_model(layout, seq_len), small_model("llama", seq_len)
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
    for model in MODELS:
        options = argparse.Namespace(model=model, packed=True, seq_len=64, batch=1)
        batch = inputs_of(torch.arange(128), 0, options)
        loss = small_model(model, 64)(**batch, use_cache=False).loss
        assert 3 < loss.item() < 9, f"{model}: about the logarithm of 256 bytes"
        check_model(small_model(model, 64))
