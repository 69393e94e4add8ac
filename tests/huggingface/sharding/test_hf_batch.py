"""What a plan refuses of a batch, on every rank and before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from parallel_plans.huggingface.losses.loss import LossFunction
from parallel_plans.huggingface.sharding.batch import num_labels, parse, shard
from tests.families import SMALL, VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.pool import on_ranks

IDS = torch.arange(8).unsqueeze(0)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "float ids": ({"input_ids": IDS.float()}, "input_ids must be integers, got torch.float32; use"),
    "no ids": (
        {"input_ids": IDS[:, :0]},
        r"input_ids must hold at least one token, got .*\(1, 0\)",
    ),
    "no rows": ({"input_ids": IDS[:0]}, r"input_ids must hold at least one token, got .*\(0, 8\)"),
    "ids beyond": ({"input_ids": IDS + 25}, "input_ids must be from 0 to 31, .* got 32"),
    "labels beyond": ({"labels": IDS + 25}, "labels must be from 0 to 31, .* got 32"),
    "negative label": ({"labels": IDS - 99}, "labels must be from 0 to 31, .* got -99"),
    "labels of bytes": (
        {"labels": IDS.byte()},
        "labels must be able to hold -100, got torch.uint8",
    ),
    "float labels": ({"labels": IDS.float()}, "labels must be integers, got torch.float32"),
    "labels of two rows": ({"labels": IDS.expand(2, 8)}, "labels must have the 1 rows of the tok"),
    "sparse mask": ({"attention_mask": IDS.to_sparse()}, "attention_mask must be a dense, strided"),
}


def test_parts_of_a_batch() -> None:
    """Labels are shifted as a rank takes its tokens; padding has none, and is no token."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    loss = LossFunction(None, True, None, None)
    types = torch.ones_like(IDS)
    given = {"input_ids": IDS, "labels": IDS, "attention_mask": types, "token_type_ids": types}
    whole = parse(model, given | {"use_cache": False}, loss)
    assert (whole.name, whole.positions, num_labels(whole)) == ("input_ids", None, 7)
    assert (whole.labels is IDS, whole.tokens is IDS) == (True, True), "nothing is copied"
    assert list(whole.others) == ["token_type_ids", "use_cache"]
    local = shard(whole, torch.tensor([1, 2, 7, 8]), 10)
    assert local.labels is not None
    assert local.mask is not None
    assert local.tokens.tolist() == [[1, 2, 7, 0]]
    assert local.labels.tolist() == [[2, 3, -100, -100]]
    assert local.positions is not None
    assert local.positions.tolist() == [[1, 2, 7, 0]]
    assert local.mask.tolist() == local.others["token_type_ids"].tolist() == [[1, 1, 1, 0]]


@on_ranks(2)
def test_refusals() -> None:
    model = under_plan(LlamaForCausalLM(LlamaConfig(**SMALL)))
    for changes, message in REFUSALS.values():
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": IDS, **changes})
    assert model(input_ids=IDS, labels=IDS.masked_fill(IDS < 3, -100)).loss.isfinite()


@on_ranks(2)
def test_states_that_are_two_outputs_of_a_graph() -> None:
    """The last hidden states are one of all states, and a graph gives no tensor as two DTensors."""
    model, stock = (small_model("Llama", "Model", num_hidden_layers=1) for _ in range(2))
    under_plan(model)
    tokens = torch.randint(2, VOCABULARY, (1, 13), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": tokens, "output_hidden_states": True, "use_cache": False}
    model(**given)  # transformers puts hooks into a model at its first call, which no graph can
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(**given)
    assert found.hidden_states[-1] is found.last_hidden_state
    for ours, theirs in zip(found.hidden_states, stock(**given).hidden_states, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
