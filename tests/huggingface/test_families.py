"""Families of transformers: under their plan they equal the stock model, eager and compiled."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_ring import SequenceAxis, sequence_layout
from parallel_plans.strategies import StrategyChoice, kind_of
from tests.dense import largest
from tests.families import FAMILIES, VOCABULARY, small_model
from tests.forced import machine_by_bytes, machine_for, taken
from tests.huggingface.planned import Results, errors_of, under_plan
from tests.pool import Pool, on_ranks
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


COMPILED_LEN = 24


def packed_batches() -> list[dict[str, torch.Tensor]]:
    """Five of one shape, each packed otherwise."""
    torch.manual_seed(1)
    result = []
    for cuts in ((), (5,), (1, 2, 3), (12, 20), tuple(range(1, COMPILED_LEN, 2))):
        index = torch.arange(COMPILED_LEN)
        starts = torch.tensor((0, *cuts))
        positions = index - starts[torch.searchsorted(starts, index, right=True) - 1]
        tokens = torch.randint(2, VOCABULARY, (1, COMPILED_LEN))
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


FOUND = {
    "Llama": "zigzag",
    "Mistral, short window": "contiguous",
    "Gemma 3": "zigzag",
    # Its layers with states need neighbouring tokens.
    "Qwen3.5": "contiguous",
}


@pytest.mark.parametrize("family", FOUND)
def test_layout(family: str) -> None:
    # The speed of another dtype stands for float32.
    machine = machine_for("ring")
    machine = replace(machine, kernels=tuple(replace(x, dtype="bfloat16") for x in machine.kernels))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        model = small_model(family)
        under_plan(model, "auto", machine=machine)
        layout = sequence_layout(mesh)
        assert layout is not None
        assert layout.spec == FOUND[family]
        assert SequenceAxis(mesh, layout).machine == machine
    finally:
        dist.destroy_process_group()


def test_without_masks() -> None:
    """An axis alone does not know them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match=r"before masks are seen.* pass choose_layout\(mask"):
            SequenceAxis(init_device_mesh("cpu", (2,)), "auto")
    finally:
        dist.destroy_process_group()
