"""Models whose layers carry a state along the sequence."""

from __future__ import annotations

import re
import warnings
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from parallel_plans.huggingface.states import state_passing
from parallel_plans.huggingface.states.state_passing import LocalStatePassing
from parallel_plans.huggingface.states.stateful import (
    first,
    passing_states,
    required_parameters,
    stateful_layers,
)
from tests.families import HYBRIDS, VOCABULARY, small_model
from tests.families import HYBRIDS as ALL_HYBRIDS
from tests.huggingface.planned import averaged, relative
from tests.huggingface.states.hybrids import LAYOUT, gradients, planned
from tests.huggingface.test_families import check_family
from tests.huggingface.test_families_trained import CHECKPOINTING, check_steps, train
from tests.pool import on_ranks

KINDS = ("plain", "padded left", "padded right")
SAMPLE = ("Qwen3-Next", "Granite 4", "LFM2", "MiniMax-01", "Inkling 2, loop")
"""A delta rule, a selective scan, convolutions alone, and a loop within a forward; convolutions of
keys and a bias by distance, in layers that run several times;
`--all-hybrids` runs the others, too."""


def _is_sample(family: str, world_size: int, stays_from: int | None) -> bool:
    """A loop runs layers that others have once."""
    return family in SAMPLE[:-1] and (world_size, stays_from) in ((3, 0), (4, None))


@pytest.mark.needs("--all-hybrids", but=_is_sample)
@pytest.mark.parametrize(("world_size", "stays_from"), [*product([2, 3, 4], [0, None])])
@pytest.mark.parametrize("family", HYBRIDS)
@on_ranks()
def test_two_runs_of_a_rank(family: str, stays_from: int | None) -> None:
    """Are two maps, or, to some length, are exchanged for one run."""
    with patch.object(state_passing, "stays_from", return_value=stays_from):
        check_family(family, "zigzag", None, KINDS)


def _is_once(family: str, world_size: int, layout: str) -> bool:
    """First, last and inner ranks are among four; a loop, which takes long, has two."""
    return family in SAMPLE and layout == LAYOUT and (world_size == 2) == (family == SAMPLE[-1])


@pytest.mark.needs("--all-hybrids", but=_is_once)
@pytest.mark.parametrize(("world_size", "layout"), [(2, LAYOUT), (4, LAYOUT), (3, "striped")])
@pytest.mark.parametrize("family", HYBRIDS)
@on_ranks()
def test_hybrid_equals_the_stock_model(family: str, layout: str) -> None:
    check_family(family, layout, None, KINDS)


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_go_on_from_their_states(family: str) -> None:
    """Two halves of a sequence are the whole with the states of the first half, and not without."""
    layers, states = stateful_layers(small_model(family)), LocalStatePassing()
    assert bool(layers) == ("attention only" not in family)
    torch.manual_seed(1)
    x = torch.randn(2, 10, 16)
    with torch.no_grad(), passing_states(layers, states):
        for layer in layers:
            whole, ends = output(layer, x), []
            for forgets in (False, True):
                states.forget()
                output(layer, x[:, :5])
                if forgets:
                    states.forget()
                ends.append(output(layer, x[:, 5:]))
            torch.testing.assert_close(ends[0], whole[:, 5:], rtol=1e-4, atol=1e-5)
            assert (ends[1] - whole[:, 5:]).norm() > 1e-3 * whole.norm()
    assert not states.unused()


BESIDE = ("dynamic_input",)
"""What a layer needs for each token beside its input."""


def output(layer: Any, hidden: Tensor) -> Tensor:
    """That of a layer that gets nothing else."""
    beside = {name: hidden.flip(-1) for name in required_parameters(layer) if name in BESIDE}
    return first(layer(hidden, **dict.fromkeys(required_parameters(layer)) | beside))


@pytest.mark.parametrize(
    ("family", "layout", "reason"),
    [
        ("RecurrentGemma", LAYOUT, r"layers\.0 \(linear_attention\).* store it in no cache"),
        ("xLSTM", LAYOUT, "store it in no cache"),
        (
            "LFM2",
            "balanced",
            r"layers\.0\.conv .*'balanced' belongs to a batch.* 'contiguous', 'st",
        ),
    ],
)
@on_ranks(1)
def test_refused_with_the_reason(family: str, layout: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        planned(family, layout)


@on_ranks(1)
def test_a_layer_that_begins_anew_is_refused() -> None:
    """As the scan of Mamba 1 does by itself."""
    reported = r"layers\.0\.mamba goes on from the recurrent state .* a single token"
    unknown = patch("parallel_plans.huggingface.states.stateful.scan_of", return_value=None)
    with unknown, pytest.raises(ValueError, match=reported):
        planned("Jamba", LAYOUT)


@pytest.mark.needs("--all-hybrids")
@pytest.mark.parametrize("layout", [LAYOUT, "zigzag"])
@pytest.mark.parametrize("family", ["LFM2", "Qwen3-Next", "Granite 4"])
@on_ranks(2)
def test_compiled_as_a_whole(family: str, layout: str) -> None:
    """Graphs break at layers with a state, and where documents are read; all else compiles."""
    # Dynamo looks for a gradient of what it compiles, be it a leaf or not.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model = planned(family, layout)
    torch.manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (2, 24))
    found = []
    torch._dynamo.reset()
    counters.clear()
    for forward in (torch.compile(model, backend="aot_eager"), model):
        for _ in range(2):
            model.zero_grad()
            loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        found.append(torch.cat([loss.detach().view(1), gradients(model)]))
    assert relative(*found) < 1e-5
    breaks = counters["graph_break"]
    found = {name for reason in breaks for name in re.findall(r"<function ([\w.<>]+) at", reason)}
    assert found == {"_forward.<locals>.forward", "ScanChunks.of"}, breaks
    assert len(breaks) == 2, breaks


CALM = {"rms_norm_eps": 0.1}
"""What a delta rule gives is near zero at some tokens, and a norm follows, whose gradient is then
up to 1 / sqrt(eps): with the eps of 1e-6 rounding grows to 0.1 within ten steps."""
DELTA_RULES = ("Qwen3-Next", "Qwen3.5", "OLMo hybrid", "Kimi Linear")


@pytest.mark.parametrize("family", DELTA_RULES)
def test_steps_do_not_amplify_rounding(family: str) -> None:
    """Weights that differ by rounding train alike, so that a larger difference is one of steps."""
    (losses, weights), (expected, stock) = (
        trained_from(family, noise) for noise in (torch.finfo(torch.float32).eps / 2, 0.0)
    )
    assert any(not torch.equal(weights[name], x) for name, x in stock.items())
    assert losses == pytest.approx(expected, abs=5e-6)
    for name, x in stock.items():
        assert (weights[name] - x).norm() <= 5e-6 * x.norm(), name


def trained_from(family: str, noise: float) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of some steps, from weights with relative noise."""
    model = small_model(family, **CALM).train()
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(1 + noise * torch.randn_like(x))
    return train(model, slice(None))[0], model.state_dict()


@pytest.mark.needs("--all-hybrids")
@pytest.mark.parametrize("family", ["Granite 4", "Qwen3-Next", "LFM2"])
@on_ranks(4)
def test_steps_of_two_runs_of_a_rank(family: str) -> None:
    """Under FSDP2, with checkpointing, without an exchange of tokens."""
    changes = CALM if family in DELTA_RULES else {}
    with patch.object(state_passing, "stays_from", return_value=0):
        check_steps(family, CHECKPOINTING["full"], "zigzag", changes)


# Gradients of each kind of state are above.
@pytest.mark.needs(
    "--all-hybrids", but=lambda family, name: (family, name) == ("Granite 4", "full")
)
@pytest.mark.parametrize("name", ["none", "full"])
@pytest.mark.parametrize("family", ["Granite 4", "Nemotron-H", "LFM2", *DELTA_RULES])
@on_ranks(4)
def test_steps_of_fsdp_equal_one_process(family: str, name: str) -> None:
    check_steps(family, CHECKPOINTING[name], LAYOUT, CALM if family in DELTA_RULES else {})


HYBRIDS = (*ALL_HYBRIDS, "Qwen4-Exp")
"""Also with an index of pools, which begin with each document."""
UNSERVED = ("Granite 4, attention only", "Inkling, scaled")
"""No layer has a state, and its masks do not know positions; scales by the position in a row."""
PACKED = {
    ("MiniMax-01", 3, 1),
    ("Qwen3-Next", 2, 1),
    ("Granite 4", 2, 1),
    ("LFM2", 4, 2),
    ("Mamba 2", 4, 2),
    ("Inkling 2", 4, 2),
    ("Qwen4-Exp", 4, 2),
}
"""Family, ranks and rows of the default run."""

Rows = tuple[tuple[int, ...], ...]
"""Where documents begin, by row of a batch of 24 tokens."""


MARKS = ("position_ids", "seq_idx", "cu_seq_lens_q", "position_ids cu_seq_lens_q")
"""What says where documents of a row begin."""


def packed(rows: Rows, mark: str = MARKS[0]) -> dict[str, Tensor]:
    """Tokens, and what says where their documents begin."""
    torch.manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (len(rows), 24))
    lengths = [torch.tensor([*starts, 24]).diff() for starts in rows]
    positions = [torch.cat([torch.arange(int(x)) for x in row]) for row in lengths]
    numbers = [torch.arange(len(row)).repeat_interleave(row) for row in lengths]
    given = {
        "position_ids": torch.stack(positions),
        "seq_idx": torch.stack(numbers),
        "cu_seq_lens_q": torch.tensor([*rows[0], 24]),
    }
    return {"input_ids": tokens} | {name: given[name] for name in mark.split()}


def check_packed(
    family: str, rows: Rows, layout: str, is_checkpointed: bool, mark: str = MARKS[0]
) -> None:
    """Logits and gradients are those of each document alone, whatever the model's code does."""
    batch = packed(rows, mark)
    model, stock = planned(family, layout, unshard_outputs=True), small_model(family)
    if is_checkpointed:
        model.train().activation_checkpointing_enable()
    parts = [
        torch.cat([stock(input_ids=x, use_cache=False).logits for x in documents], 1)
        for row, starts in zip(batch["input_ids"].split(1), rows, strict=True)
        for documents in [row.tensor_split(starts[1:], 1)]
    ]
    expected = torch.cat(parts)
    logits = model(**batch, use_cache=False).logits
    weights = torch.randn_like(logits)
    for x in (logits, expected):
        (x * weights).sum().backward()
    assert relative(logits, expected) < 1e-5
    assert relative(averaged(gradients(model)), gradients(stock)) < 1e-5


@pytest.mark.needs(
    "--all-hybrids",
    but=lambda family, world_size, rows, layout: (family, world_size, len(rows)) in PACKED,
)
@pytest.mark.parametrize(
    ("world_size", "rows", "layout"),
    [
        (4, ((0, 6, 18),), "zigzag"),  # with shards
        (2, ((0, 5, 12),), LAYOUT),
        (3, ((0, 7, 9, 15),), LAYOUT),  # within the reach of a convolution
        (3, ((0, 1, 10, 23),), "striped"),
        (4, ((0, 5, 7, 17, 19),), "zigzag"),  # ends and beginnings of one token
        (4, ((0, 1, 2, 3, 23), (0, 7, 8, 9, 10)), "zigzag"),  # other ones in each row
    ],
)
@pytest.mark.parametrize("family", [x for x in HYBRIDS if x not in UNSERVED])
@on_ranks()
def test_packed_documents_are_as_alone(family: str, rows: Rows, layout: str) -> None:
    check_packed(family, rows, layout, len(rows) > 1)


BY_POSITION = ("Inkling 2", "Inkling 2, loop")
"""They scale by position_ids, which go on over documents that something else marks."""


@pytest.mark.needs("--all-hybrids", but=lambda family: family == "Granite 4")
@pytest.mark.parametrize("family", [x for x in HYBRIDS if x not in (*UNSERVED, *BY_POSITION)])
@on_ranks(2)
def test_whatever_marks_documents(family: str) -> None:
    """Masks of Granite 4 do not know positions, and its layers with a state no mark at all."""
    for mark in MARKS:
        check_packed(family, ((0, 5, 7, 17),), "zigzag", False, mark)


def two_batches(family: str, is_checkpointed: bool) -> Tensor:
    """Gradients of two batches whose documents differ, in one backward."""
    model = planned(family, "zigzag").train()
    if is_checkpointed:
        model.activation_checkpointing_enable()
    losses = []
    for rows in (((0, 5, 11),), ((0, 9),)):
        batch = packed(rows)
        losses.append(model(**batch, labels=batch["input_ids"], use_cache=False).loss)
    torch.stack(losses).sum().backward()
    return gradients(model)


@on_ranks(2)
def test_checkpointing_repeats_a_layer_with_its_own_documents() -> None:
    found, expected = (two_batches("LFM2", x) for x in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_layers_that_know_no_batch_are_not_repeated_with_another() -> None:
    with pytest.raises(ValueError, match="does not say of which batch"):
        two_batches("Mamba 2", True)
