"""Packed documents: their embeddings, losses of two models, and an axis of all ranks of a mesh."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring import (
    Balanced,
    Mask,
    SequenceAxis,
    sequence_layout,
    sequence_runs,
    shard_sequence,
)
from parallel_plans.huggingface.pooling import pool_documents
from tests.dense import largest
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import all_ranks, gradient_errors, shard_weights, under_plan
from tests.pool import on_ranks

SEQUENCE, CUTS = 23, (0, 1, 9, 14, 23)
TOKENS = torch.randint(2, VOCABULARY, (4, SEQUENCE), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([23, 5, 17, 1])[:, None]


def _mask(side: str) -> Tensor:
    places = torch.arange(SEQUENCE)
    return ((places < LENGTHS) if side == "right" else (places >= SEQUENCE - LENGTHS)).long()


def _packed() -> dict[str, Any]:
    cuts = torch.tensor(CUTS, dtype=torch.int32)
    starts = cuts[:-1].repeat_interleave(cuts.diff())
    positions = torch.arange(SEQUENCE) - starts
    return {"input_ids": TOKENS[:1], "position_ids": positions[None], "use_cache": False}


# The arguments of a model, and how its documents are said to `pool_documents`.
BATCHES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "whole rows": ({"input_ids": TOKENS}, {}),
    "padded left": (
        {"input_ids": TOKENS, "attention_mask": _mask("left")},
        {"attention_mask": _mask("left")},
    ),
    "padded right": (
        {"input_ids": TOKENS, "attention_mask": _mask("right")},
        {"attention_mask": _mask("right")},
    ),
    "packed": (_packed(), {"cu_seq_lens": torch.tensor(CUTS)}),
}


def _contrast(embeddings: Tensor) -> Tensor:
    """A document is near to itself, and far from the others."""
    near = F.normalize(embeddings, dim=-1)
    return F.cross_entropy(near @ near.roll(1, 0).T / 0.1, torch.arange(len(near)))


def _expected(hidden: Tensor, said: dict[str, Tensor], pooling: str) -> Tensor:
    """One document after the other."""
    if "cu_seq_lens" in said:
        parts = [hidden[0, begin:end] for begin, end in pairwise(CUTS)]
    else:
        masks = said.get("attention_mask", torch.ones_like(TOKENS)).bool()
        parts = [row[mask] for row, mask in zip(hidden, masks, strict=True)]
    return torch.stack([x[-1] if pooling == "last" else x.mean(0) for x in parts])


def _check_gradients(models: tuple[Any, Any], losses: list[Tensor]) -> None:
    """Of the first model those of all ranks, averaged."""
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-6)
    found, expected = (
        torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        for loss, model in zip(losses, models, strict=True)
    )
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            dist.all_reduce(x)
            error = (x / dist.get_world_size() - y).norm() / y.norm()
            assert error < 5e-6


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "zigzag"),
        pytest.param(4, "striped", marks=pytest.mark.repeats),
        pytest.param(3, "contiguous", marks=pytest.mark.repeats),
        pytest.param(4, "balanced", marks=pytest.mark.repeats),
    ],
)
@on_ranks()
def test_embeddings(layout: str) -> None:
    ring, stock = small_model("Llama").model, small_model("Llama").model
    under_plan(ring, layout)
    for batch, said in BATCHES.values():
        for pooling in ("last", "mean"):
            hidden = [model(**batch).last_hidden_state for model in (ring, stock)]
            expected = _expected(hidden[1], said, pooling)
            found = pool_documents(hidden[0], pooling, **said)
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
            alone = pool_documents(hidden[1], pooling, **said)
            torch.testing.assert_close(alone, expected, atol=1e-6, rtol=1e-6)
            _check_gradients((ring, stock), [_contrast(x) for x in (found, expected)])


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, "zigzag"), pytest.param(4, "zigzag", marks=pytest.mark.repeats)],
)
@on_ranks()
def test_distillation(layout: str) -> None:
    """A student learns the distribution of a teacher of another family and its own labels."""
    teachers = [small_model("Qwen3") for _ in range(2)]
    students = [small_model("Mistral, short window") for _ in range(2)]
    for model in (teachers[0], students[0]):
        under_plan(model, layout)
    for batch, is_token in (
        ({"input_ids": TOKENS, "attention_mask": _mask("right")}, _mask("right")),
        (_packed(), torch.ones_like(TOKENS[:1])),
    ):
        losses = []
        for teacher, student in zip(teachers, students, strict=True):
            with torch.no_grad():
                target = teacher(**batch).logits.log_softmax(-1)
            logits = student(**batch).logits
            of_token = F.kl_div(
                logits.log_softmax(-1), target, reduction="none", log_target=True
            ).sum(-1)
            losses.append((of_token * is_token).sum() / is_token.sum())
        _check_gradients((students[0], students[1]), losses)


WHOLE = torch.zeros(1, 8, 2)


def test_refuses() -> None:
    both = {"attention_mask": torch.ones(1, 8), "cu_seq_lens": torch.tensor([0, 8])}
    for given, match in (
        ({"pooling": "first"}, "unknown pooling 'first'; known ones are last, mean"),
        (both, "both say documents; leave one out"),
        ({"attention_mask": torch.ones(1, 7)}, r"must be \(1, 8\), \(B, S\), got \(1, 7\)"),
        ({"cu_seq_lens": torch.tensor([0, 4, 4])}, r"ascending .* one row of 8 .* \[0, 4, 4\]"),
        ({"cu_seq_lens": torch.tensor([0, 9])}, r"ascending boundaries .* got \[0, 9\] and 1 row"),
    ):
        with pytest.raises(ValueError, match=match):
            pool_documents(WHOLE, **given)


@on_ranks(2)
def test_refuses_what_no_model_made() -> None:
    mesh = all_ranks()
    with pytest.raises(ValueError, match=r"outputs of a model under a plan, .* unshard_sequence"):
        pool_documents(shard_sequence(WHOLE, mesh, 1), "mean")


# A long one, which needs all ranks, and short ones, which stay whole.
FLAT_LENGTHS = torch.tensor([5, 70, 1, 9, 12, 8, 6, 9, 8])
ENDS = torch.cat([torch.tensor([0]), FLAT_LENGTHS.cumsum(0)])
NUM_TOKENS = int(ENDS[-1])
LAYOUT = Balanced(Mask.causal(), NUM_TOKENS, 4, ENDS)


def test_short_documents_stay_whole_and_long_ones_do_not() -> None:
    held = [set(LAYOUT.positions(rank, 4, NUM_TOKENS)) for rank in range(4)]
    documents = [set(range(*ends)) for ends in pairwise(ENDS.tolist())]
    num_ranks = [sum(bool(x & document) for x in held) for document in documents]
    assert num_ranks == [2, 4, 1, 1, 1, 1, 1, 1, 3], "shards of equal length cut a few"


def packed_batch() -> dict[str, Tensor]:
    """One row. Positions begin again with each document, whose first token has no label."""
    tokens = torch.randint(VOCABULARY, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, ENDS[:-1]] = -100
    positions = torch.arange(NUM_TOKENS) - ENDS[:-1].repeat_interleave(FLAT_LENGTHS)
    return {"input_ids": tokens, "labels": labels, "position_ids": positions[None]}


def flattened() -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    SequenceAxis(mesh["cp"], "zigzag")  # another axis, which has nothing to do with it
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    assert sequence_layout(everyone) is None
    return everyone


@on_ranks(4)
def test_loss_and_gradients_are_those_of_one_process() -> None:
    everyone = flattened()
    model, stock = (small_model("Llama").train() for _ in range(2))
    under_plan(model, "balanced", mesh=everyone)
    shard_weights(model, model.model.layers, everyone)
    # A cache would join the documents.
    losses = [x(**packed_batch(), use_cache=False).loss for x in (model, stock)]
    for loss in losses:
        loss.backward()
    assert (losses[0] - losses[1]).abs() < 1e-5
    assert largest(gradient_errors(model, stock, floor=0)) < 1e-5


@on_ranks(4)
def test_attention_is_that_of_one_process() -> None:
    everyone = flattened()
    axis = SequenceAxis(everyone, "balanced")
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 2, NUM_TOKENS, 8)
    mine = [axis.shard(x, 2, LAYOUT).to_local() for x in whole]
    out = axis.attention(*mine, cu_seqlens=ENDS, runs=sequence_runs(LAYOUT))
    sharded = DTensor.from_local(out, everyone, [Shard(2)], run_check=False)
    document = torch.repeat_interleave(FLAT_LENGTHS)
    seen = (document[:, None] == document) & torch.ones(len(document), len(document)).tril().bool()
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, attn_mask=seen)
    found = axis.unshard(sharded, 2, LAYOUT)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
