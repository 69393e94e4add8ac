"""Heads that read the sequence as a whole equal those of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dense import largest
from tests.families import small_model
from tests.huggingface.planned import gradient_errors, relative, under_plan
from tests.huggingface.test_families import SEQ_LEN, batches
from tests.pool import on_ranks

CLASS = torch.tensor([2, 0])
SCORE = torch.tensor([0.3, -1.0])
HEADS: dict[str, tuple[str, int, Tensor]] = {
    # family, number of labels, labels
    "classes": ("Llama", 3, CLASS),
    "reward": ("Qwen2", 1, SCORE),
    "several classes": ("OPT", 3, torch.eye(2, 3)),
    "first token": ("RoBERTa", 3, CLASS),
    "mean": ("ModernBERT", 3, CLASS),
}


def outputs_of(model: Any, batch: dict[str, Any]) -> list[Tensor]:
    """Loss and logits."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return [output.loss, *(x for name, x in output.items() if name.endswith("logits"))]


CASES = [
    *((name, 2, "zigzag", False, False) for name in HEADS),
    ("classes", 4, "striped", False, False),
    ("reward", 2, "balanced", False, False),
    ("reward", 2, "striped", True, False),
    # The graph of a model has the layers, of which the heads are no part.
    pytest.param("reward", 2, "striped", False, True, marks=pytest.mark.repeats),
]


@pytest.mark.parametrize(("name", "world_size", "layout", "unshards", "compiled"), CASES)
@on_ranks()
def test_heads_equal_one_process(name: str, layout: str, unshards: bool, compiled: bool) -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    family, num_labels, labels = HEADS[name]
    changes = {"num_hidden_layers": 1 if compiled else 2, "num_labels": num_labels}
    changes |= {"classifier_pooling": "mean"} if name == "mean" else {}
    ring, stock = (
        small_model(family, "ForSequenceClassification", use_cache=False, **changes)
        for _ in range(2)
    )
    under_plan(ring, layout, unshard_outputs=unshards)
    if compiled:
        ring.compile(backend="aot_eager", fullgraph=True)
    given: dict[str, dict[str, Tensor]] = batches()
    if name == "first token":  # which is padding: each kernel makes something else of that
        del given["padded left"]
    if compiled:  # each of the others is another graph, but finds its last tokens alike
        given = {name: given[name] for name in ("padded right", "packed")}
    else:  # stock models log a warning, which breaks a graph
        given["embeddings"] = {"inputs_embeds": torch.randn(2, SEQ_LEN, 16)}
    for kind, batch in given.items():
        pairs = zip(
            *(outputs_of(x, batch | {"labels": labels}) for x in (ring, stock)), strict=True
        )
        errors = [relative(*pair) for pair in pairs] + gradient_errors(ring, stock, floor=1)
        assert largest(errors) < 1e-5, (kind, errors)


@on_ranks(1)
def test_a_backbone_that_is_under_a_plan() -> None:
    model = small_model("Llama", "ForSequenceClassification")
    under_plan(model.model)
    with pytest.raises(ValueError, match="replaced already, by a context_parallel_plan"):
        under_plan(model)
