"""Bytes that are counted on tensors without content are those that gloo sends, on each rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtensor_ring import Mask, compare_strategies
from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.all_to_all.ulysses import ulysses_attention
from dtensor_ring.decode.run import MERGES, Combine
from dtensor_ring.lab import recorded
from dtensor_ring.lab.problem import TensorSizes
from dtensor_ring.lab.recorded import PACK, PACKET, Cost, RankAttention, Recorder
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import as_strategy
from dtensor_ring.transport.transport import ProcessGroupTransport, TransferPolicy
from tests.lab.counted import counted
from tests.pool import Pool
from tests.rings import Case, Ring

WORLD_SIZE, SEQ_LEN, DTYPE = 4, 96, torch.bfloat16
HEADS, HEAD_DIMS, BATCH = (8, 4), (16, 8), 2
SEEN: list[dict[str, Any]] = [
    {"mask": Mask.causal()},
    {"mask": Mask.sliding(11)},
    {"mask": Mask.causal(), "documents": ((0, 7, 40, 41, 90),)},
    {"mask": Mask.full()},
]
STRATEGIES = [*ROUTES, "ulysses:2", "ulysses:2+all_gather", "ulysses:4"]
POLICIES = [TransferPolicy(), TransferPolicy("int8"), TransferPolicy(grad_dtype=torch.bfloat16)]
POLICIES += [TransferPolicy("fp8")]
ROWS = 3, 64, 1024, 4096
"""Queries that are decoded, times batch; many of them are merged in two rounds."""


def rings() -> list[Case]:
    layouts, policies = cycle(["contiguous", "zigzag", "striped"]), cycle(POLICIES)
    return [
        Case(
            Ring(as_layout(next(layouts)), WORLD_SIZE, SEQ_LEN, strategy=strategy, **seen),
            *(DTYPE, HEADS, HEAD_DIMS, BATCH),
            policy=next(policies),
        )
        for strategy in STRATEGIES
        for seen in SEEN
    ]


def test_counted_is_what_gloo_sends(pool: Pool) -> None:
    """Strategies, masks, layouts, eight bits, and decode; `test_chosen_keys.py` has chosen keys."""
    by_rank = pool.run(WORLD_SIZE, _sent)
    for rank, found in enumerate(by_rank):
        expected = [*map(_of_ring, rings(), cycle([rank])), *_decoded(rank)]
        assert len(expected) >= 36
        for number, costs in enumerate(zip(found, expected, strict=True)):
            of_gloo, here = costs
            assert of_gloo == [replace(x, held=0) for x in here], (rank, number)
            assert sum(x.messages for x in here), "something is sent"


def _of_ring(case: Case, rank: int) -> tuple[Cost, Cost]:
    ring, policy = case.ring, case.policy
    heads = as_strategy(ring.strategy, WORLD_SIZE).heads
    where = ring.layout, ring.layout, heads, rank, WORLD_SIZE, SEQ_LEN
    exchange = all_to_all_plan(*where) if heads > 1 else None
    dtypes = DTYPE, policy.dtype_of_keys(DTYPE), policy.sum_dtype(DTYPE)
    sizes = TensorSizes(HEADS, HEAD_DIMS, BATCH, *dtypes)
    return RankAttention(ring.plans()[rank], exchange, sizes).costs()


def _decoded(rank: int) -> list[tuple[Cost]]:
    found = []
    for merge in MERGES:
        for rows in ROWS:
            transport = Recorder()
            out = torch.empty(rows, 2, 1, 16, device="meta")
            Combine(transport, rank, WORLD_SIZE, merge)(out, out[..., 0])
            found.append((transport.cost,))
    return found


def _sent() -> list[list[Cost]]:
    """What a rank really sends, forward and backward."""
    rank, group = dist.get_rank(), dist.group.WORLD
    found = []
    for case in rings():
        attend = case.attend
        if as_strategy(case.ring.strategy, WORLD_SIZE).heads > 1:
            attend = _ulysses(case)
        before = replace(case, ring=replace(case.ring, strategy="ring"))
        (out, _), there = counted(lambda: attend(*before.shards(rank)))  # noqa: B023
        _, back = counted(lambda: out.backward(torch.ones_like(out)))  # noqa: B023
        found.append([there, back])
    for merge in MERGES:
        for rows in ROWS:
            out = torch.zeros(rows, 2, 1, 16)
            combine = Combine(ProcessGroupTransport(group), rank, WORLD_SIZE, merge)
            found.append([counted(lambda: combine(out, out[..., 0]))[1]])  # noqa: B023
    return found


def _ulysses(case: Case) -> Any:
    return lambda *inputs: ulysses_attention(*inputs, case.call(), with_lse=False)


@pytest.mark.parametrize(("mask", "sends_all"), [(Mask.full(), True), (Mask.sliding(11), False)])
def test_a_gpu_rounds_its_own_shard_into_its_message(mask: Mask, sends_all: bool) -> None:
    """So that one launch reads both tensors and writes what is sent, if all of it is."""
    plan = Ring(as_layout("contiguous"), WORLD_SIZE, SEQ_LEN, mask).plans()[1]
    sizes = TensorSizes(HEADS, HEAD_DIMS, BATCH, DTYPE, torch.int8, torch.float32)
    attention = RankAttention(plan, None, sizes)
    for on_gpu in (True, False):
        does = next(attention.recordings(True, on_gpu)).does.tolist()
        packed = [x for x in does if x[1] == PACKET]
        assert len(packed) == (not (on_gpu and sends_all))
        assert not on_gpu or does[0][1] == PACK, "what rounds it"


def test_of_many_ranks_those_that_move_most_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says so; bytes are the same, as the busiest rank is among them."""
    asked: Any = Mask.causal(), 256, 8
    documents = (0, 3, 50, 51, 120, 256)

    def compared() -> Any:
        return compare_strategies(*asked, cu_seqlens=documents, strategies=["ring", "direct"])

    every = compared()
    assert "ranks" not in str(every)
    monkeypatch.setattr(recorded, "MAX_RECORDED", 4)
    few = compared()
    assert "bytes and messages: the most of 2 of 8 ranks, those that move most" in str(few)
    for all_ranks, some in zip(every.rows, few.rows, strict=True):
        assert some.counted < 8
        found, most = ((x.forward, x.backward) for x in (some, all_ranks))
        for here, there in zip(found, most, strict=True):
            assert (here.sent, here.received) == (there.sent, there.received)
