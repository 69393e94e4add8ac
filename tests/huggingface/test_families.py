"""Every family of transformers under its plan equals the stock model."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_plans.strategies import StrategyChoice, kind_of
from tests.dense import largest
from tests.families import FAMILIES, VOCABULARY, small_model
from tests.forced import machine_by_bytes, taken
from tests.huggingface.planned import Results, errors_of, under_plan
from tests.pool import on_ranks
from tests.results import of_first_rank, results_with_logits
from tests.test_public import ROOT

SEQ_LEN = 23
RINGS = ((2, "zigzag"), (4, "contiguous"), (2, "striped"), (4, "zigzag"))


def batches() -> dict[str, dict[str, Tensor]]:
    """The ways people feed a model: labels are the tokens, but for padding."""
    torch.manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (2, SEQ_LEN))
    index = torch.arange(SEQ_LEN).expand(2, -1)
    held = {"padded left": index >= torch.tensor([[6], [0]])}
    held["padded right"] = index < torch.tensor([[SEQ_LEN], [15]])
    starts = torch.tensor([[0, 9, 10], [0, 4, 17]])
    packed = torch.stack(
        [index[0] - row[torch.searchsorted(row, index[0], right=True) - 1] for row in starts]
    )
    packed[0, : starts[0, 1]] += 7  # the rest of a document that was cut
    padded = {
        name: {
            "input_ids": tokens * mask,
            "attention_mask": mask.long(),
            # Nor that of a first token: what predicts it is padding, which sees anything.
            "labels": tokens.masked_fill(~(mask & mask.roll(1, -1)), -100),
        }
        for name, mask in held.items()
    }
    plain = {"input_ids": tokens, "labels": tokens}
    return {"plain": plain, **padded, "packed": plain | {"position_ids": packed}}


@lru_cache(maxsize=1)
def stock_results(family: str, kinds: tuple[str, ...] | None = None) -> dict[str, Results]:
    """By batch, of one process; once for all layouts."""
    stock = small_model(family)
    given = batches()
    return {name: results_with_logits(stock, given[name]) for name in kinds or given}


def check_family(
    family: str,
    layout: str,
    strategy: StrategyChoice = None,
    kinds: tuple[str, ...] | None = None,
    **how: Any,
) -> None:
    """In batches of these kinds, or of all: the loss, logits and all gradients."""
    model = small_model(family)
    under_plan(model, layout, strategy=strategy, unshard_outputs=True, **how)
    given = batches()
    expected = of_first_rank(lambda: stock_results(family, kinds))
    for name, of_stock in expected.items():
        errors = errors_of(results_with_logits(model, given[name]), of_stock)
        assert largest(errors.values()) < 1e-5, (name, errors)


ALIKE = {
    "Qwen2": "Llama",
    "Qwen3-MoE": "Qwen3-MoE, router loss",
    "Phi-3": "Mistral, short window",
    "OLMo 2": "Qwen3",
    "Granite": "Gemma 2",
    "BERT": "RoBERTa",
}
"""Families whose attention has the form of another's, its window, norms or scale. Their tokens are
compared in test_generate, if they generate any, and the census has their types."""
OF_TWO = ("Llama, dynamic", "OPT")
"""Over two ranks, since they show what a family counts or rescales, whatever the layout."""


def every_family() -> list[Any]:
    """Each family over one ring, in turn; the others repeat what these show."""
    often = {
        (family, RINGS[number % 2 * 2 if family in OF_TWO else number % 4])
        for number, family in enumerate(x for x in FAMILIES if x not in ALIKE)
    }
    return [
        pytest.param(family, *ring, marks=() if (family, ring) in often else pytest.mark.repeats)
        for family, ring in product(FAMILIES, RINGS)
    ]


@pytest.mark.parametrize(("family", "world_size", "layout"), every_family())
@on_ranks()
def test_family_equals_the_stock_model(family: str, layout: str) -> None:
    check_family(family, layout)


STRATEGIES: dict[str, StrategyChoice] = {
    "Llama": "ulysses:2+all_gather",
    "Gemma 2": {"sliding": "direct", "full_attention": "ulysses"},
    "gpt-oss": {"sliding_attention": "ulysses:2", "full": "all_gather"},
}


@pytest.mark.parametrize("family", STRATEGIES)
@on_ranks(4)
def test_strategies(family: str) -> None:
    check_family(family, "zigzag", STRATEGIES[family])


@pytest.mark.parametrize("family", ["Gemma 3", "gpt-oss"])
@on_ranks(4)
def test_auto_chooses_by_layer(family: str) -> None:
    """Where all-to-alls take as long as some bytes, windows send fewer and others do not."""
    how = {"machine": machine_by_bytes(1600.0)}
    with taken() as found:
        check_family(family, "contiguous", "auto", ("plain",), **how)
    kinds: dict[str, set[str]] = {}
    for mask, strategy, _ in found:
        kinds.setdefault(kind_of(mask), set()).add(strategy)
    assert kinds == {"sliding": {"ring"}, "full": {"ulysses:4"}}


REFUSED_STRATEGIES: dict[str, tuple[str, Any, type[Exception]]] = {
    "got chunked; the layers of this model have full": ("Llama", {"chunked": "ring"}, ValueError),
    "got window; .* have full, sliding": (
        "Gemma 2",
        {"window": "ring", "full": "ring"},
        ValueError,
    ),
    "unknown strategy 'tree'": ("Gemma 2", {"sliding": "tree"}, ValueError),
    "by names such as 'sliding', got 3": ("Gemma 2", {3: "ring"}, TypeError),
    "strategy must be a name, a str, got 3": ("Gemma 2", {"full": 3}, TypeError),
    "do not divide the 1 of the axis": ("Gemma 2", {"full": "ulysses:2"}, ValueError),
}


@on_ranks(1)
def test_refused_strategies() -> None:
    for match, (family, strategy, error) in REFUSED_STRATEGIES.items():
        model = small_model(family)
        with pytest.raises(error, match=match):
            under_plan(model, strategy=strategy)


def test_the_page_lists_every_family() -> None:
    page = (ROOT / "docs" / "huggingface.md").read_text()
    rows = re.findall(r"^\| (.+?) \| .+(?: \| \d\.\de-\d\d){3} \|$", page, re.MULTILINE)
    assert rows == list(FAMILIES)
