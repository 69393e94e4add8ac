"""Blocks that use none of their keywords hand the plan's on to their attention."""

from __future__ import annotations

from typing import Any

import torch

from parallel_plans.huggingface.core.modules import restore_model
from parallel_plans.huggingface.core.passed_on import deaf_attention
from tests.dense import largest
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import gradient_errors, under_plan
from tests.pool import on_ranks


def test_blocks_are_found_by_their_code() -> None:
    assert not deaf_attention(small_model("Llama"))
    model = small_model("Nemotron")
    layers = model.model.layers
    assert deaf_attention(model) == [(layer, layer.self_attn) for layer in layers]


def _models(num_layers: int = 2) -> tuple[Any, Any]:
    """A model under its plan, and the stock model."""
    model, stock = (small_model("Nemotron", num_hidden_layers=num_layers) for _ in range(2))
    return under_plan(model, "zigzag"), stock


@on_ranks(2)
def test_trains_as_one_process() -> None:
    """Two batches before one backward, checkpointed: each block has what its own batch gave it."""
    model, stock = _models()
    tokens = torch.randint(2, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(1))
    packed = torch.cat([torch.arange(9), torch.arange(12)]).expand(2, -1)
    batches = ({"input_ids": tokens}, {"input_ids": tokens.flip(1), "position_ids": packed})
    for each in (model, stock):
        each.train()
        each.activation_checkpointing_enable()
        losses = [
            each(**batch, labels=batch["input_ids"], use_cache=False).loss for batch in batches
        ]
        (losses[0] + 2 * losses[1]).backward()
    assert largest(gradient_errors(model, stock)) < 1e-4
    restore_model(model)
    with torch.no_grad():
        again = model(input_ids=tokens, labels=tokens).loss
        torch.testing.assert_close(again, stock(input_ids=tokens, labels=tokens).loss)


@on_ranks(2)
def test_compiled_in_one_graph() -> None:
    model, stock = _models(1)
    tokens = torch.randint(2, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": tokens, "labels": tokens}
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**given).loss
    loss.backward()
    expected = stock(**given).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert largest(gradient_errors(model, stock)) < 1e-5
