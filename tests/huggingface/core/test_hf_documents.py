"""Which documents a batch of a Hugging Face model holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.utils import _to_kwargs

from dtensor_ring import Mask
from parallel_plans.huggingface.core.attention_function import RingInputs
from parallel_plans.huggingface.core.documents import (
    DocumentBounds,
    cached_documents,
    find_documents,
    left_padding,
)
from parallel_plans.huggingface.core.layer_inputs import DecodeInputs, ShardedInputs
from parallel_plans.huggingface.core.patterns import LayerMask

SEQ_LEN = 6
BY_POSITIONS = LayerMask(Mask.causal(), True)
OTHER = LayerMask(Mask.full(), False)


def bounds(cu_seqlens: Tensor | None) -> list[list[int]] | None:
    """By row, without the empty documents that fill up."""
    if cu_seqlens is None:
        return None
    assert cu_seqlens.dtype == torch.int32
    return [row.unique_consecutive().tolist() for row in cu_seqlens.view(-1, cu_seqlens.shape[-1])]


CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "nothing": ({}, None, None),
    "positions": ({"position_ids": [[0, 1, 0, 1, 2, 0]]}, [[0, 2, 5, 6]], None),
    "positions that jump": ({"position_ids": [[0, 1, 5, 6, 7, 8]]}, [[0, 2, 6]], None),
    "positions of rows": (
        {"position_ids": [[0, 1, 2, 3, 4, 5], [3, 0, 1, 2, 3, 0]]},
        [[0, 6], [0, 1, 5, 6]],
        None,
    ),
    "padding": (
        {"attention_mask": [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0]]},
        [[0, 2, 6], [0, 3, 6], [0, 1, 5, 6]],
        [[0, 2, 6], [0, 3, 6], [0, 1, 5, 6]],
    ),
    "rows of padding only": ({"attention_mask": [[0] * 6, [1] * 6]}, [[0, 6]] * 2, [[0, 6]] * 2),
    "padding, not positions": (
        {"attention_mask": [[1] * 6], "position_ids": [[0, 1, 0, 1, 2, 0]]},
        [[0, 6]],
        [[0, 6]],
    ),
    "boundaries, not positions": (
        {"cu_seq_lens_q": [0, 1, 4], "cu_seq_lens_k": [0, 1, 4], "position_ids": [[0] * 6]},
        [[0, 1, 4, 6]],
        [[0, 1, 4, 6]],
    ),
    "numbers of documents": (
        {"seq_idx": [[0, 0, 1, 1, 2, 2], [3, 3, 3, 3, -1, -1]]},
        [[0, 2, 4, 6], [0, 4, 6]],
        [[0, 2, 4, 6], [0, 4, 6]],
    ),
    "numbers and positions": (
        {"seq_idx": [[0, 0, 0, 0, 1, 1]], "position_ids": [[0, 1, 0, 1, 2, 3]]},
        [[0, 2, 4, 6]],
        [[0, 2, 4, 6]],
    ),
    "numbers and a mask of ones": (
        {"seq_idx": [[0, 0, 0, 0, 1, 1]], "attention_mask": [[1] * 6]},
        [[0, 4, 6]],
        [[0, 4, 6]],
    ),
}


@pytest.mark.parametrize(("given", "packed", "others"), CASES.values(), ids=list(CASES))
def test_documents(given: dict[str, Any], packed: Any, others: Any) -> None:
    found = find_documents(SEQ_LEN, set(), **{k: torch.tensor(x) for k, x in given.items()})
    assert bounds(found.of(BY_POSITIONS)[0]) == packed
    assert bounds(found.of(OTHER)[0]) == others


def test_positions_may_separate_documents_in_all_layers() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]])
    found = find_documents(SEQ_LEN, set(), position_ids=positions, for_all=True)
    assert bounds(found.of(OTHER)[0]) == bounds(found.of(BY_POSITIONS)[0]) == [[0, 2, 5, 6]]


def test_chunks_of_numbered_documents_count_by_positions() -> None:
    given = {"position_ids": [[4, 5, 6, 7, 8, 9]], "seq_idx": [[1, 1, 1, 2, 2, 2]]}
    documents = find_documents(SEQ_LEN, {3}, **{k: torch.tensor(x) for k, x in given.items()})
    chunked = LayerMask(Mask.chunked(3), True)
    assert bounds(documents.of(chunked)[0]) == [[0, 2, 3, 5, 6]]


def test_chunks_count_from_where_a_document_begins() -> None:
    padding = torch.tensor([[0, 1, 1, 1, 1, 1]])
    chunked = LayerMask(Mask.chunked(2), True)
    cu_seqlens, mask = find_documents(SEQ_LEN, {2}, attention_mask=padding).of(chunked)
    assert (bounds(cu_seqlens), mask) == ([[0, 1, 3, 5, 6]], Mask.causal())
    assert find_documents(SEQ_LEN, {2}).of(chunked) == (None, Mask.chunked(2))


def test_chunks_of_packed_documents_count_from_position_0() -> None:
    for positions, expected in (
        ([[3, 4, 5, 0, 1, 2]], [[0, 1, 3, 5, 6]]),
        ([[3, 4, 5, 6, 7, 8]], [[0, 2, 4, 6]]),
    ):
        documents = find_documents(SEQ_LEN, {2}, position_ids=torch.tensor(positions))
        assert bounds(documents.of(LayerMask(Mask.chunked(2), True))[0]) == expected


def test_tokens_that_were_added_are_not_seen() -> None:
    assert bounds(DocumentBounds().bounded(4).of(OTHER)[0]) == [[0, 4]]


@pytest.mark.parametrize(
    ("match", "given"),
    [
        ("one stretch of tokens", {"attention_mask": [[1, 0, 1, 1, 1, 1]]}),
        ("start at 0", {"cu_seq_lens_q": [1, 6]}),
        ("never decrease", {"cu_seq_lens_q": [0, 4, 2, 6]}),
        ("at or before 6 tokens", {"cu_seq_lens_q": [0, 7]}),
        ("the same", {"cu_seq_lens_q": [0, 3, 6], "cu_seq_lens_k": [0, 2, 6]}),
        ("seq_idx .* both say", {"seq_idx": [[0] * 6], "attention_mask": [[0, 1, 1, 1, 1, 1]]}),
        ("both say", {"cu_seq_lens_q": [0, 6], "attention_mask": [[0, 1, 1, 1, 1, 1]]}),
        ("one row of boundaries", {"cu_seq_lens_q": [0, 6], "cu_seq_lens_k": [0, 1, 6]}),
    ],
)
def test_refuses(match: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=match):
        find_documents(SEQ_LEN, set(), **{k: torch.tensor(x) for k, x in given.items()})


def test_boundaries_stay_on_the_cpu() -> None:
    """fully_shard moves what a layer is called with to the device, on a GPU, by this function."""
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    axis: Any = SimpleNamespace()
    documents = DocumentBounds(bounds, bounds, {2: bounds}, bounds)
    layers = (
        ShardedInputs(axis, 4, documents, bounds, bounds),
        DecodeInputs(axis, documents, bounds, 4, None, bounds),
    )
    dealt = RingInputs(layers, bounds, {})
    _, (moved,) = _to_kwargs((), {"ring": dealt}, torch.device("meta"), False)
    assert moved["ring"].indices.is_meta
    assert moved["ring"].layers == layers


def test_documents_of_a_cache() -> None:
    """Padding is a document of its own, and chunks count from the first token."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    padding = left_padding(mask, 7)
    assert padding is not None
    found = cached_documents(padding, 0, 7, {3})
    assert found.packed is not None
    assert found.packed.tolist() == [[0, 2, 7], [0, 0, 7]]
    assert found.chunks[3].tolist() == [[0, 2, 5, 7, 7, 7], [0, 0, 3, 6, 7, 7]]
    found = cached_documents(padding, 4, 7, {3})  # counted from what is held
    assert found.packed is not None
    assert found.packed.tolist() == [[0, 0, 3], [0, 0, 3]]
    assert found.chunks[3].tolist() == [[0, 0, 1, 3, 3, 3], [0, 0, 0, 2, 3, 3]]
    assert left_padding(mask[:, 2:], 5) is None
    assert cached_documents(None, 0, 5, set()).packed.tolist() == [0, 0, 5]  # all rows alike
