"""Models under their plan and torch.compile: no graph break, no graph for each batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from parallel_plans.strategies import kind_of
from tests.dense import largest
from tests.families import VOCABULARY, small_model
from tests.forced import machine_by_bytes, taken
from tests.huggingface.planned import under_plan
from tests.pool import Pool, on_ranks

SEQ_LEN = 24


def packed_batches() -> list[dict[str, torch.Tensor]]:
    """Five of one shape, each packed otherwise."""
    torch.manual_seed(1)
    result = []
    for cuts in ((), (5,), (1, 2, 3), (12, 20), tuple(range(1, SEQ_LEN, 2))):
        index = torch.arange(SEQ_LEN)
        starts = torch.tensor((0, *cuts))
        positions = index - starts[torch.searchsorted(starts, index, right=True) - 1]
        tokens = torch.randint(2, VOCABULARY, (1, SEQ_LEN))
        result.append(
            {"input_ids": tokens, "labels": tokens, "position_ids": positions.unsqueeze(0)}
        )
    return result


def compile_counts(family: str, each_layer: bool, **how: Any) -> tuple[int, list[float]]:
    """How often it compiled, and the differences of the loss from that of eager."""
    # Dynamo looks for a gradient of what it compiles, be it a leaf or not.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    depth = {"num_hidden_layers": 4} if each_layer else {}
    models: list[Any] = [small_model(family, **depth) for _ in range(2)]
    for model in models:
        under_plan(model, **how)
    eager, compiled = models
    counter = CompileCounterWithBackend("aot_eager")
    if each_layer:
        for layer in compiled.model.layers:
            layer.compile(backend=counter, fullgraph=True)
    else:
        compiled.compile(backend=counter, fullgraph=True)
    differences, counts = [], []
    for batch in packed_batches():
        losses = [model(**batch).loss for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
        differences.append((losses[0] - losses[1]).abs().item())
        counts.append(counter.frame_count)
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:
            differences.append(((ours.grad - theirs.grad).norm() / theirs.grad.norm()).item())
    return counts, differences


@pytest.mark.parametrize(
    ("family", "each_layer"),
    [
        # Layers of two kinds, with sinks, and with a softcap.
        *(("gpt-oss", False), ("Gemma 2", True)),
        *(
            pytest.param(family, each_layer, marks=pytest.mark.repeats)
            for family, each_layer in (
                ("gpt-oss", True),
                ("Gemma 2", False),
                *(("Llama", each_layer) for each_layer in (False, True)),
            )
        ),
    ],
)
def test_packed_batches_compile_once(pool: Pool, family: str, each_layer: bool) -> None:
    for counts, differences in pool.run(2, compile_counts, family, each_layer, timeout=300):
        assert counts[0] == counts[-1] <= 2, counts
        assert largest(differences) < 1e-5, differences


@pytest.mark.repeats
@on_ranks(2, timeout=300)
def test_auto_compiles_once() -> None:
    """The layers of each kind have the strategy of their mask, whatever the documents are."""
    with taken() as found:
        counts, differences = compile_counts(
            "gpt-oss", False, layout="contiguous", strategy="auto", machine=machine_by_bytes(700.0)
        )
    strategies = {(kind_of(mask), strategy) for mask, strategy, _ in found}
    assert counts[0] == counts[-1] <= 2, counts
    assert largest(differences) < 1e-5, differences
    # Eager layers see short documents, for which none travels.
    assert strategies - {("full", "ring")} == {("sliding", "ring"), ("full", "ulysses:2")}
