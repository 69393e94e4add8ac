"""Packed documents in models whose layers carry a state along the sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.families import HYBRIDS as ALL_HYBRIDS
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import averaged, relative
from tests.huggingface.states.hybrids import LAYOUT, gradients, planned
from tests.pool import on_ranks

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
