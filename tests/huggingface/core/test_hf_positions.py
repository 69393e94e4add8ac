"""Positions of a shard are those that the model counts, and measures, in the whole batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_plans.huggingface.core.positions import LargestPosition, counter_of
from tests.families import small_model
from tests.huggingface.planned import under_plan
from tests.huggingface.test_families import batches
from tests.pool import on_ranks

TOKENS = torch.tensor([[0, 0, 3, 4, 5, 6], [3, 0, 5, 6, 7, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
BATCHES: dict[str, dict[str, Tensor]] = {
    "tokens": {"input_ids": TOKENS},
    "tokens and mask": {"input_ids": TOKENS, "attention_mask": MASK},
    "mask of booleans": {"input_ids": TOKENS, "attention_mask": MASK.bool()},
    "embeddings": {"inputs_embeds": torch.zeros(2, 6, 16)},
}


def looked_up(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """What a model makes of the positions of a batch."""
    results: list[Tensor] = []
    table = next(x for name, x in model.named_modules() if "position" in name.rpartition(".")[2])
    hook = table.register_forward_hook(lambda module, args, output: results.append(output))
    model(**batch)
    hook.remove()
    return results[0].expand(2, -1, -1)


@pytest.mark.parametrize("family", ["RoBERTa", "OPT"])
def test_positions_are_as_the_model_counts_them(family: str) -> None:
    model = small_model(family)
    counts = counter_of(model)
    assert counts is not None
    for name, batch in BATCHES.items():
        tokens = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
        counted = counts(tokens, batch.get("attention_mask"))
        given = looked_up(model, batch | {"position_ids": counted})
        assert torch.equal(given, looked_up(model, batch)), name


@pytest.mark.parametrize("family", ["Llama", "BERT", "Phi-3, longrope"])
def test_most_models_count_from_zero(family: str) -> None:
    assert counter_of(small_model(family)) is None


@pytest.mark.parametrize("family", ["Phi-3, longrope", "Llama, dynamic"])
def test_shards_have_the_factors_of_their_batch(family: str) -> None:
    rotary, whole = (small_model(family).model.rotary_emb for _ in range(2))
    largest = LargestPosition(rotary)
    for length in (30, 12, 40):  # on both sides of the length at which factors change
        positions = torch.arange(length).unsqueeze(0)
        largest.set(positions)
        for shard in ([*range(5)], [length - 1], []):
            ours = rotary(torch.zeros(1, len(shard), 4), position_ids=positions[:, shard])
            for mine, theirs in zip(ours, whole(torch.zeros(1), positions), strict=True):
                torch.testing.assert_close(mine, theirs[:, shard], rtol=0, atol=0)
        largest.clear()
    alone = torch.arange(5).unsqueeze(0)
    assert rotary(torch.zeros(1), alone)[0].equal(whole(torch.zeros(1), alone)[0])


@pytest.mark.parametrize(
    "family", ["Phi-3, longrope", pytest.param("OPT", marks=pytest.mark.repeats)]
)
@on_ranks(2)
def test_compiles_without_a_break(family: str) -> None:
    """Eager and compiled, by batch."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    models = [small_model(family, num_hidden_layers=1) for _ in range(2)]
    for model in models:
        under_plan(model)
    models[1].compile(backend="eager", fullgraph=True)  # Dynamo is what sees positions
    given = batches()
    losses = [
        [model(**given[name]).loss.item() for model in models] for name in ("packed", "padded left")
    ]
    for eager, compiled in losses:
        assert compiled == pytest.approx(eager, rel=1e-6)
