"""Which documents a batch of a Hugging Face model holds, and where its tokens are in them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.utils import _to_kwargs

from dtensor_ring import Mask
from parallel_plans.huggingface.core import documents
from parallel_plans.huggingface.core.attention_function import RingInputs
from parallel_plans.huggingface.core.documents import (
    DocumentBounds,
    _traced,
    cached_documents,
    find_documents,
    find_starts,
    joined,
)
from parallel_plans.huggingface.core.layer_inputs import DecodeInputs, ShardedInputs
from parallel_plans.huggingface.core.patterns import LayerMask
from parallel_plans.huggingface.core.positions import LargestPosition, counter_of
from parallel_plans.huggingface.generation.left_padding import left_padding
from tests.families import small_model
from tests.huggingface.planned import under_plan
from tests.huggingface.test_families import batches
from tests.pool import on_ranks

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


def test_documents() -> None:
    for name, (given, packed, others) in CASES.items():
        found = find_documents(SEQ_LEN, set(), **{k: torch.tensor(x) for k, x in given.items()})
        assert bounds(found.of(BY_POSITIONS)[0]) == packed, name
        assert bounds(found.of(OTHER)[0]) == others, name


def test_positions_may_separate_documents_in_all_layers() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]])
    found = find_documents(SEQ_LEN, set(), position_ids=positions, for_all=True)
    assert bounds(found.of(OTHER)[0]) == bounds(found.of(BY_POSITIONS)[0]) == [[0, 2, 5, 6]]


IN_CHUNKS: list[tuple[dict[str, Any], int, list[list[int]]]] = [
    # By positions within numbered documents, from where a document begins, and from position 0.
    ({"position_ids": [[4, 5, 6, 7, 8, 9]], "seq_idx": [[1, 1, 1, 2, 2, 2]]}, 3, [[0, 2, 3, 5, 6]]),
    ({"attention_mask": [[0, 1, 1, 1, 1, 1]]}, 2, [[0, 1, 3, 5, 6]]),
    ({"position_ids": [[3, 4, 5, 0, 1, 2]]}, 2, [[0, 1, 3, 5, 6]]),
    ({"position_ids": [[3, 4, 5, 6, 7, 8]]}, 2, [[0, 2, 4, 6]]),
]


def test_chunks() -> None:
    for given, size, expected in IN_CHUNKS:
        found = find_documents(SEQ_LEN, {size}, **{k: torch.tensor(x) for k, x in given.items()})
        cu_seqlens, mask = found.of(LayerMask(Mask.chunked(size), True))
        assert (bounds(cu_seqlens), mask) == (expected, Mask.causal()), given
    chunked = Mask.chunked(2)
    assert find_documents(SEQ_LEN, {2}).of(LayerMask(chunked, True)) == (None, chunked)


def test_tokens_that_were_added_are_not_seen() -> None:
    assert bounds(DocumentBounds().bounded(4).of(OTHER)[0]) == [[0, 4]]


REFUSED: dict[str, dict[str, Any]] = {
    "one stretch of tokens": {"attention_mask": [[1, 0, 1, 1, 1, 1]]},
    "start at 0": {"cu_seq_lens_q": [1, 6]},
    "never decrease": {"cu_seq_lens_q": [0, 4, 2, 6]},
    "at or before 6 tokens": {"cu_seq_lens_q": [0, 7]},
    "the same": {"cu_seq_lens_q": [0, 3, 6], "cu_seq_lens_k": [0, 2, 6]},
    "seq_idx .* both say": {"seq_idx": [[0] * 6], "attention_mask": [[0, 1, 1, 1, 1, 1]]},
    "both say": {"cu_seq_lens_q": [0, 6], "attention_mask": [[0, 1, 1, 1, 1, 1]]},
    "whole numbers, got torch.float32": {"cu_seq_lens_q": [0.0, 3.5, 6.0]},
    "one row of boundaries": {"cu_seq_lens_q": [0, 6], "cu_seq_lens_k": [0, 1, 6]},
}


def test_refuses() -> None:
    for match, given in REFUSED.items():
        with pytest.raises(ValueError, match=match):
            find_documents(SEQ_LEN, set(), **{k: torch.tensor(x) for k, x in given.items()})


def test_boundaries_stay_on_the_cpu() -> None:
    """fully_shard moves what a layer is called with to the device, on a GPU, by this function."""
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    axis: Any = SimpleNamespace(kernel=None)
    documents = DocumentBounds(bounds, bounds, {2: bounds}, bounds)
    layers = (
        ShardedInputs(axis, 4, documents, bounds, bounds),
        DecodeInputs(documents, bounds, 4, None, bounds),
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


LONGER, CHUNKS = 17, {3, 5}


def drawn_positions(seed: int, num_rows: int) -> Tensor:
    """Packed documents, the first of which may begin anywhere."""
    draw = torch.Generator().manual_seed(seed)
    restarts = torch.rand(num_rows, LONGER, generator=draw) < 0.2
    index = torch.arange(LONGER).expand(num_rows, -1)
    begins = torch.where(restarts, index, 0).cummax(1).values
    return index - begins + 4 * (begins == 0)


def drawn_mask(seed: int, num_rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, LONGER + 1, (2, num_rows, 1), generator=draw).sort(0).values
    index = torch.arange(LONGER)
    return ((index >= edges[0]) & (index < edges[1])).long()


def compacted(found: DocumentBounds) -> dict[str, list[list[int]] | None]:
    """Without the empty documents that fill up."""

    def rows(x: Tensor | None) -> list[list[int]] | None:
        if x is None:
            return None
        return [row.unique().tolist() for row in x.view(-1, x.shape[-1])]

    named = {"packed": found.packed, "others": found.others}
    return {
        name: rows(x) for name, x in (named | {str(k): x for k, x in found.chunks.items()}).items()
    }


@pytest.mark.parametrize("num_rows", [1, 3])
def test_documents_are_those_of_tensors_of_fixed_shapes(num_rows: int) -> None:
    """Which a compiler traces: another way to the same, whose tensors have the whole length."""
    for seed in range(20):
        mask, positions = drawn_mask(seed, num_rows), drawn_positions(seed, num_rows)
        for given in ((mask, None), (None, positions), (mask, positions)):
            expected = _traced(LONGER, CHUNKS, *given, has_axes=False, for_all=False)
            with patch.object(documents, "BLOCK", 4):
                named = dict(zip(("attention_mask", "position_ids"), given, strict=True))
                found = find_documents(LONGER, CHUNKS, **named)
            assert compacted(found) == compacted(expected)


@pytest.mark.parametrize("by_positions", [True, False])
def test_parts_join(by_positions: bool) -> None:
    """Each part knows the value before it, as a rank gets it from another one."""
    values = drawn_positions(3, 2) if by_positions else drawn_mask(3, 2)
    tables, before = [], None
    for begin in range(0, LONGER, 6):
        part = values[:, begin : begin + 6]
        tables.append(find_starts(part, by_positions, begin, before).table)
        before = part[:, -1:]
    whole = find_starts(values, by_positions)
    assert torch.equal(joined(tables, 2, by_positions).table, whole.table)


def test_most_batches_have_boundaries_of_one_shape() -> None:
    """Whose number does not follow the length, as long as there are few documents."""
    shapes = set()
    for length, num_documents in ((3000, 2), (3000, 900), (6000, 7)):
        positions = torch.arange(length).unsqueeze(0) % (length // num_documents)
        found = find_starts(positions, by_positions=True)
        shapes.add(found.boundaries(length).shape)
        assert len(found.table) >= num_documents
    assert shapes == {torch.Size([1025])}
    every = find_starts(torch.zeros(1, 3000, dtype=torch.long), by_positions=True)
    assert every.boundaries(3000).tolist() == [*range(3001)]


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
