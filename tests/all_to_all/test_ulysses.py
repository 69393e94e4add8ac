"""Attention for which tokens are exchanged for heads, against dense attention in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dtensor_ring import (
    Balanced,
    BlockCyclic,
    Contiguous,
    Mask,
    Slices,
    Striped,
    TransferPolicy,
    ZigZag,
)
from dtensor_ring.all_to_all.ulysses import ulysses_attention, ulysses_backward
from dtensor_ring.planning.run_table import RunTable
from tests.dense import largest
from tests.ops.test_op import errors
from tests.played_group import PlayedGroup, play_group
from tests.rings import Case, Ring, local

CAUSAL, FULL, WINDOW = Mask.causal(), Mask.full(), Mask.sliding(5)
DOCUMENTS = ((0, 5, 6, 20, 24),)
BY_ROW = ((0, 7, 24, 24), (0, 3, 9, 20))
EIGHT = tuple(0.25 * i - 1 for i in range(8))
SLICES = Slices.prefix([[0, 10, 24], [0, 24, 24]], [[4, 2], [7, 0]])


def case(ring: Ring, strategy: str, **options: Any) -> Case:
    options = {"heads": (8, 4), "head_dims": (4, 4), "grad_lse": True} | options
    return Case(replace(ring, strategy=strategy), **options)


SEEN = {
    "causal": (CAUSAL, None, (ZigZag(), Striped(), Contiguous(), BlockCyclic(2))),
    "window": (WINDOW, DOCUMENTS, (ZigZag(), Striped())),
    "full": (FULL, BY_ROW, (ZigZag(), Contiguous())),
}
STRATEGIES = [(2, "ulysses"), (4, "ulysses:2"), (3, "ulysses"), (6, "ulysses:3+all_gather")]
STRATEGIES += [(8, "ulysses:4+direct")]
"""Each layout and mask has two of them, in turn."""
CASES = {
    **{
        f"{layout.spec}, {name}, {strategy} of {size}": case(
            Ring(layout, size, 24, SEEN[name][0], SEEN[name][1]), strategy
        )
        for i, (name, layout) in enumerate((x, y) for x in SEEN for y in SEEN[x][2])
        for size, strategy in (STRATEGIES[2 * i % 5], STRATEGIES[(2 * i + 1) % 5])
    },
    "uneven heads": case(
        Ring(ZigZag(), 4, 24, CAUSAL, BY_ROW), "ulysses", heads=(14, 7), sinks=(0.5, -1.0) * 7
    ),
    "28 heads on 8": case(Ring(ZigZag(), 8, 32, CAUSAL), "ulysses", heads=(28, 4)),
    "multi-query": case(Ring(ZigZag(), 6, 24, CAUSAL), "ulysses", heads=(6, 1), sinks=EIGHT[:6]),
    "multi-head": case(Ring(ZigZag(), 4, 24, CAUSAL), "ulysses:2", heads=(5, 5)),
    "sinks": case(Ring(ZigZag(), 4, 24, WINDOW, DOCUMENTS), "ulysses:2", sinks=EIGHT),
    "sinks, copies": case(Ring(ZigZag(), 8, 32, CAUSAL), "ulysses", sinks=EIGHT),
    "softcap": case(Ring(ZigZag(), 4, 24, CAUSAL), "ulysses", softcap=1.5, kernel="reference"),
    "head dims": case(Ring(ZigZag(), 4, 24, CAUSAL), "ulysses:2", head_dims=(6, 3)),
    "out only": case(Ring(ZigZag(), 4, 24, CAUSAL), "ulysses", grad_lse=False),
    "slices": case(Ring(ZigZag(), 4, 24, FULL, slices=SLICES), "ulysses:2"),
    "prefix": case(Ring(Striped(), 4, 24, Mask(3, 0, prefix=2), BY_ROW), "ulysses"),
    "chunks": case(Ring(ZigZag(), 4, 24, Mask.chunked(7)), "ulysses:2"),
    "balanced": case(
        Ring(Balanced(CAUSAL, 24, 4, DOCUMENTS, block=2), 4, 24, CAUSAL, DOCUMENTS), "ulysses:2"
    ),
    "uneven tokens": case(Ring(ZigZag(), 4, 19, CAUSAL), "ulysses:2"),
    "empty ranks": case(Ring(Contiguous(), 4, 5, FULL), "ulysses"),
    "cross": case(Ring(ZigZag(), 4, 24, FULL, key_seq_len=13), "ulysses:2"),
    "a turn": case(
        Ring(
            *(RunTable([[(20, 2)], [], [(23, 1)], [(22, 1)]]), 4, 24, CAUSAL),
            key_layout=RunTable([[(0, 9), (20, 1)], [(9, 11)], [(21, 3)], []]),
            begin=20,
        ),
        "ulysses:2",
    ),
    **{
        f"eight bits, {strategy}": case(
            Ring(ZigZag(), 4, 24, CAUSAL), strategy, policy=TransferPolicy(kv_dtype="int8")
        )
        for strategy in ("ulysses", "ulysses:2")
    },
    "bfloat16": case(Ring(ZigZag(), 8, 32, CAUSAL), "ulysses", dtype=torch.bfloat16),
}


def run_case(case: Case, group: PlayedGroup) -> list[torch.Tensor]:
    """Results, and gradients by autograd, which are those of the backward that trades again."""
    # What a rank has before anything is exchanged.
    before = replace(case, ring=replace(case.ring, strategy="ring"))
    query, key, value, *sinks = inputs = before.shards(group.rank())
    given = [x[:, :, before.ring.positions(group.rank())] for x in case.grads()]
    call = case.call(*sinks or [None], group_name=group.group_name)
    results = ulysses_attention(query, key, value, call)
    grads = torch.autograd.grad(results[: len(given)], inputs, given)
    grad_out, grad_lse = (*given, None)[:2]
    for keep in (False, True):  # what was exchanged
        with torch.no_grad():
            out, lse = ulysses_attention(query, key, value, call, keep=keep)
            again = ulysses_backward(grad_out, grad_lse, query, key, value, out, lse, call)
        for one, other in zip(grads, again, strict=False):  # that of no sinks is empty
            assert torch.equal(one, other)
    return [x.detach() for x in (*results, *grads)]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_as_dense(case: Case) -> None:
    expected = case.expected()  # before there are threads, each of which would compute it
    by_rank = play_group(case.ring.world_size, lambda group: run_case(case, group))
    tolerance = {torch.float64: 1e-11, torch.bfloat16: 4e-2}[case.dtype]
    ring = replace(case.ring, strategy="ring")
    if case.sinks:  # a rank has the gradient of its heads and the tokens of its group
        whole = torch.stack([found[-1] for found in by_rank]).sum(0)
        by_rank = [[*found[:-1], whole] for found in by_rank]
    for rank, found in enumerate(by_rank):
        of = [ring.positions(rank, of_keys=index in (3, 4)) for index in range(len(found))]
        wanted = [local(x, positions) for x, positions in zip(expected, of, strict=True)]
        assert largest(errors(found, wanted).values()) < tolerance, f"rank {rank}"


LATE = ((0, 3, 25),)
WRONG = {
    "after the end": (Ring(ZigZag(), 4, 24, CAUSAL, LATE), "cu_seqlens must start at 0, never"),
    "decreasing": (Ring(ZigZag(), 4, 24, CAUSAL, ((0, 9, 4, 24),)), "cu_seqlens must start at"),
    "of a row": (Ring(ZigZag(), 4, 24, CAUSAL, (*BY_ROW, (0, 24, 24, 24))), r"or \(2, D\+1\), got"),
    "of keys": (
        Ring(ZigZag(), 4, 24, FULL, ((0, 8, 24),), 13, ((0, 8, 14),)),
        "key_cu_seqlens must start at 0",
    ),
    "as many": (
        Ring(ZigZag(), 4, 24, FULL, ((0, 8, 24),), 13, ((0, 13),)),
        "as many boundaries in cu_seqlens as in key_cu_seqlens, got 3 and 2",
    ),
    "cross, causal": (Ring(ZigZag(), 4, 24, CAUSAL, key_seq_len=13), "it takes Mask.full"),
    "late slices": (
        Ring(ZigZag(), 4, 24, FULL, slices=Slices.documents([0, 25])),
        "slices must end at or before the sequence length 24",
    ),
    "slices twice": (
        Ring(
            ZigZag(), 4, 24, FULL, slices=Slices([(0, 9), (8, 24)], [(0, 5)] * 2, [(None, 0)] * 2)
        ),
        "slices must be disjoint",
    ),
    "slices and a mask": (
        Ring(ZigZag(), 4, 24, CAUSAL, slices=Slices.documents([0, 24])),
        "slices say all that is seen",
    ),
}


@pytest.mark.parametrize("strategy", ["ulysses", "ulysses:2"])
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_sent(name: str, strategy: str) -> None:
    ring, match = WRONG[name]
    wrong = case(ring, strategy, batch=2)

    def run(group: PlayedGroup) -> None:
        shards = replace(wrong, ring=replace(ring, strategy="ring")).shards(group.rank())
        with (
            patch.object(group.transport, "start", side_effect=AssertionError),
            pytest.raises(ValueError, match=match),
        ):
            ulysses_attention(*shards, wrong.call(group_name=group.group_name))

    play_group(4, run)


def test_autocast_is_before_the_exchange() -> None:
    """Query, key and value travel in its dtype."""
    half = case(Ring(ZigZag(), 2, 8, CAUSAL), "ulysses", dtype=torch.float32)

    def run(group: PlayedGroup) -> int:
        start, sent = group.transport.start, []
        with (
            patch.object(group.transport, "start", lambda *x: sent.extend(x[1]) or start(*x)),
            torch.autocast("cpu", torch.bfloat16),
        ):
            shards = replace(half, ring=replace(half.ring, strategy="ring")).shards(group.rank())
            call = half.call(group_name=group.group_name)
            out, _ = ulysses_attention(*shards, call, with_lse=False)
        assert out.dtype == torch.bfloat16
        return sum(message.flat.numel() for message in sent)

    # Half of the 8, 4 and 4 heads of 4 tokens, and of the 8 heads of the output.
    assert play_group(2, run) == [2 * 2 * 4 * 4 * (4 + 2 + 2 + 4)] * 2
