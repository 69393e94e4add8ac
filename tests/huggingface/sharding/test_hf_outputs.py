"""Outputs of a compiled model under its plan."""

from __future__ import annotations

import torch

from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.pool import on_ranks


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
