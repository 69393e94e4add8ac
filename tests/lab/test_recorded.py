"""What is counted on tensors without content is what rings send, to the byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from threading import local
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import (
    Mask,
    SequenceAxis,
    compare_strategies,
    select_keys,
    selected_attention,
    simulate_attention,
)
from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.all_to_all.ulysses import is_exchanged, ulysses_attention
from dtensor_ring.command.main import main
from dtensor_ring.compute.trace import Label
from dtensor_ring.decode.run import MERGES, Combine
from dtensor_ring.lab import recorded
from dtensor_ring.lab.problem import TensorSizes
from dtensor_ring.lab.recorded import PACK, PACKET, Cost, RankAttention, Recorder, by_field
from dtensor_ring.ops.options import flatten
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import as_strategy
from dtensor_ring.quantised.block_scales import BLOCK_SIZE
from dtensor_ring.selected.plan import MAX_SELECTED
from dtensor_ring.transport import quantised_rotation, rotation
from dtensor_ring.transport.quantised_rotation import QuantisedPacket, QuantisedRotation
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, TransferPolicy, Work
from parallel_plans.models import load
from tests.lab.counted import counted
from tests.played import PlayedTransport, play
from tests.played_group import PlayedGroup, play_group
from tests.pool import Pool
from tests.rings import Case, Ring
from tests.rings import local as local_of
from tests.selected.test_selected_ops import inputs, sequence_dim

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
EXCHANGED = BATCH * SEQ_LEN // WORLD_SIZE * sum(HEADS) * sum(HEAD_DIMS) * DTYPE.itemsize
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


@pytest.mark.parametrize("large", [rotation.LARGE, 6 * 128])
def test_counted_is_what_gloo_sends(
    pool: Pool, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategies, masks, layouts, eight bits, and decode; chosen keys are below.

    Large messages of whole shards need no buffer.
    """
    monkeypatch.setattr(rotation, "LARGE", large)
    by_rank = pool.run(WORLD_SIZE, _sent, large)
    for rank, found in enumerate(by_rank):
        expected = [*map(_of_ring, rings(), cycle([rank])), *_decoded(rank)]
        assert len(expected) >= 36
        for number, costs in enumerate(zip(found, expected, strict=True)):
            of_gloo, here = costs
            assert [replace(x, held=0) for x in of_gloo] == [replace(x, held=0) for x in here]
            beside = [y.held - x.held for x, y in zip(of_gloo, here, strict=True)]
            case = rings()[number] if number < len(rings()) else None
            if case is None or "ulysses" not in case.ring.strategy:
                assert not any(beside), (rank, number)
            elif case.policy.kv_dtype is None:
                # Query, key, value and output of the ring, and their gradients.
                assert beside[0] == EXCHANGED, (rank, number)
                assert beside[1] >= 2 * EXCHANGED, (rank, number)
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


def _sent(large: int) -> list[list[Cost]]:
    """What a rank really sends, forward and backward."""
    rank, group = dist.get_rank(), dist.group.WORLD
    with patch.object(rotation, "LARGE", large):
        found = _of_rings(rank)
    for merge in MERGES:
        for rows in ROWS:
            out = torch.zeros(rows, 2, 1, 16)
            combine = Combine(ProcessGroupTransport(group), rank, WORLD_SIZE, merge)
            found.append([counted(lambda: combine(out, out[..., 0]))[1]])  # noqa: B023
    return found


def _of_rings(rank: int) -> list[list[Cost]]:
    found = []
    for case in rings():
        attend = case.attend
        if as_strategy(case.ring.strategy, WORLD_SIZE).heads > 1:
            attend = _ulysses(case)
        before = replace(case, ring=replace(case.ring, strategy="ring"))
        (out, _), there = counted(lambda: attend(*before.shards(rank)))  # noqa: B023
        _, back = counted(lambda: out.backward(torch.ones_like(out)))  # noqa: B023
        found.append([there, back])
    return found


def _ulysses(case: Case) -> Any:
    return lambda *inputs: ulysses_attention(*inputs, case.call(), with_lse=False)


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("mask", [Mask.full(), Mask.sliding(11)])
def test_a_gpu_rounds_its_own_shard_into_its_message(mask: Mask, has_kernel: bool) -> None:
    """So that one launch reads both tensors and writes what is sent, if all of it is.

    A real rotation, whose kernel is played, copies as many packets as the dry run counts.
    """
    plans = Ring(as_layout("contiguous"), WORLD_SIZE, SEQ_LEN, mask).plans()
    sizes = TensorSizes(HEADS, HEAD_DIMS, BATCH, DTYPE, torch.int8, torch.float32)
    real = _copied(plans, sizes, has_kernel)
    for plan, (written, copied) in zip(plans, real, strict=True):
        dry = next(RankAttention(plan, None, sizes).recordings(True, has_kernel)).does.tolist()
        assert len([x for x in dry if x[1] == PACKET]) == copied, plan.rank
        columns = BATCH * HEADS[1] * SEQ_LEN // WORLD_SIZE
        both_ways = 2 * (columns * sum(HEAD_DIMS) * DTYPE.itemsize + written)
        assert not has_kernel or dry[0][1:3] == [PACK, both_ways], "rounded, and back"


def _copied(plans: list[Plan], sizes: TensorSizes, has_kernel: bool) -> list[tuple[int, int]]:
    """Bytes that each rank's launch writes into its own message, and packets that it copies."""
    shapes = [(BATCH, sizes.heads[1], SEQ_LEN // WORLD_SIZE, x) for x in HEAD_DIMS]
    take, round_pair = QuantisedPacket.take, quantised_rotation.quantise_pair

    def run(rank: int, transport: PlayedTransport) -> tuple[int, int]:
        here.rank = rank
        pair: Any = tuple(torch.randn(x, dtype=DTYPE) for x in shapes)
        with QuantisedRotation(transport, plans[rank], pair, torch.int8) as rotation:
            for step in plans[rank].steps:
                label = Label("forward", step.number, step.source)
                rotation.begin_step(step, label)
                rotation.end_step(step, label)
        return rotation._own.num_bytes, takers.count(rank)

    def taken(packet: QuantisedPacket, whole: QuantisedPacket) -> None:
        takers.append(here.rank)
        take(packet, whole)

    def rounded(key: Any, value: Any, form: Any, size: int = BLOCK_SIZE, into: Any = ()) -> Any:
        found = round_pair(key, value, form, size)
        for to, x in zip(into, found, strict=False):
            to.data.copy_(x.data)
        return found

    # A rank that ends early leaves its thread to another, so a thread is told its rank.
    takers, here = list[int](), local()
    with (
        patch.object(QuantisedPacket, "take", taken),
        patch.object(quantised_rotation, "has_pair_kernel", lambda *_: has_kernel),
        patch.object(quantised_rotation, "quantise_pair", rounded),
    ):
        return play(WORLD_SIZE, run)


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


# What it costs to choose keys is what a transport counts, to the byte.

CHOSEN_LEN, NUM_INDEX, NUM_LATENT, CHOSEN_BATCH = 64, 4, 6, 2
ASKED: Any = Mask.causal(), CHOSEN_LEN
SHAPE: Any = {
    "heads": (4, 1),
    "head_dim": NUM_LATENT,
    "batch": CHOSEN_BATCH,
    "dtype": torch.float32,
}


def _of_rank(layout: str, route: str, k: int) -> tuple[Cost, Cost]:
    """Forward and backward, where a rank's queries choose all keys that they see."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = SequenceAxis(mesh, layout).positions(CHOSEN_LEN)
    x = {n: y.index_select(sequence_dim(n), mine) for n, y in inputs(CHOSEN_LEN).items()}
    latents, index = x["latents"].requires_grad_(), (x["index_query"], x["index_key"], x["weights"])

    def forward() -> Any:
        chosen = select_keys(*index, k, mesh=mesh, route=route)
        seen = set(range(int(mine.max()) + 1))
        assert set(chosen[chosen >= 0].flatten().tolist()) == seen, "the most that there is"
        return selected_attention(x["query"], latents, 5, chosen, mesh=mesh).sum()

    loss, there = counted(forward)
    return there, counted(loss.backward)[1]


CASES = [(2, "zigzag", "ring", 40), (4, "contiguous", "all_gather", 40)]
CASES += [(4, "zigzag", "direct", 60), (4, "striped", "around", 60)]


@pytest.mark.parametrize(("world_size", "layout", "route", "k"), CASES)
def test_costs_are_those_counted(
    pool: Pool, world_size: int, layout: str, route: str, k: int
) -> None:
    """Up to 7/8 of the keys of a sequence are asked for; above that all of them travel."""
    choice: Any = {"layout": layout, "strategies": [route], "chosen": (k, NUM_INDEX, NUM_LATENT)}
    (row,) = compare_strategies(*ASKED, world_size, **SHAPE, **choice).rows
    ranks = pool.run(world_size, _of_rank, layout, route, k)
    for found, costs in zip((row.forward, row.backward), zip(*ranks, strict=True), strict=True):
        assert replace(found, held=0) == replace(by_field(max, costs), held=0)
        assert found.held
    assert row.launches == row.tiles


def test_what_is_held() -> None:
    """Two ranks with halves: all keys travel, so none is copied; gradients come beside them."""
    choice: Any = {"layout": "contiguous", "strategies": ["ring"]}
    choice["chosen"] = (60, NUM_INDEX, NUM_LATENT)
    (row,) = compare_strategies(*ASKED, 2, **SHAPE, **choice).rows
    index, keys = (CHOSEN_LEN // 2 * CHOSEN_BATCH * x * 4 for x in (NUM_INDEX, NUM_LATENT))
    assert row.forward == Cost(index + keys, index + keys, 2, max(index, keys))
    assert row.backward == Cost(2 * keys, 2 * keys, 2, 3 * keys)


@pytest.mark.parametrize("given", ["16,4,6", "config.json"])
def test_command(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers, or those of a config, whose text model is one of its parts."""
    names = "index_topk", "index_head_dim", "kv_lora_rank", "qk_rope_head_dim"
    config = {"text_config": dict(zip(names, (16, 4, 4, 2), strict=True))}
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = given if "," in given else str(tmp_path / given)
    asked = ["--seq-len", "64", "--world-size", "4", "--json", "--chosen", chosen]
    assert main(load, ["compare", *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = compare_strategies(*ASKED, 4, chosen=(16, 4, 6)).rows
    assert [x["backward"] for x in found] == [asdict(x.backward) for x in expected]


def test_wrong_numbers_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for chosen, text in (("16,4", "such as"), ("nowhere.json", "cannot be read")):
        asked = ["--seq-len", "64", "--world-size", "4", "--chosen", chosen]
        assert main(load, ["compare", *asked]) == 2
        assert text in capsys.readouterr().err


def test_what_is_compared() -> None:
    """Routes of the index keys; heads are no strategy, and seconds are not simulated."""
    rows = compare_strategies(*ASKED, 4, chosen=(16, 4, 6)).rows
    assert [x.strategy for x in rows if x.why_not is None] == list(ROUTES)
    refused = [x.why_not for x in rows if x.strategy.startswith("ulysses")]
    assert refused
    assert all(x is not None and "index keys have one head" in x for x in refused)
    with pytest.raises(ValueError, match="not simulated; leave machine out"):
        compare_strategies(*ASKED, 4, chosen=(16, 4, 6), machine="h100")
    wrong: list[Any] = [(16, 4), 7]
    for given in wrong:
        with pytest.raises(TypeError, match=r"such as|must be a mapping"):
            compare_strategies(*ASKED, 4, chosen=given)
    with pytest.raises(ValueError, match="of llama lacks index_topk, index_head_dim, kv_lora_rank"):
        compare_strategies(*ASKED, 4, chosen={"model_type": "llama"})
    with pytest.raises(ValueError, match="keys of a query"):
        compare_strategies(*ASKED, 4, chosen=(MAX_SELECTED + 1, 4, 6))


# The laboratory counts the messages of sums in a fixed order as rings send them.

FIXED = TransferPolicy(order="fixed", block=16)
FIXED_LEN = 64
FIXED_CASES = [
    ("whole_blocks:16", "ring", 4),
    ("contiguous", "ring", 2),
    ("zigzag", "all_gather", 3),
    ("striped", "ring", 2),
    ("zigzag", "ulysses:2", 4),
]


@pytest.mark.parametrize(("layout", "strategy", "world_size"), FIXED_CASES)
def test_bytes_are_those_that_are_sent(layout: str, strategy: str, world_size: int) -> None:
    ring = Ring(as_layout(layout), world_size, FIXED_LEN, Mask.causal(), strategy=strategy)
    case = Case(ring, torch.float32, (4, 4), (32, 32), batch=1, policy=FIXED)
    sent = _played(case)
    (row,) = compare_strategies(
        *(Mask.causal(), FIXED_LEN, world_size, (4, 4), 32),
        layout=layout,
        dtype=torch.float32,
        policy=FIXED,
        strategies=[strategy],
    ).rows
    assert (row.forward.sent, row.backward.sent) == tuple(map(max, zip(*sent, strict=True)))


def _played(case: Case) -> list[list[int]]:
    """The bytes that each rank sends forward, and backward."""
    ring = Ring(case.ring.layout, case.ring.world_size, FIXED_LEN, Mask.causal())

    def run(group: PlayedGroup) -> list[int]:
        counts, start = [0], group.transport.start

        def counting(receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
            counts[-1] += sum(x.flat.nbytes for x in sends)
            return start(receives, sends)

        group.transport.start = counting  # type: ignore[method-assign]
        own = ring.positions(group.rank())
        shards = [local_of(x, own).detach().requires_grad_() for x in case.inputs()]
        call = case.call(None, group.group_name)
        if is_exchanged(call):
            out, _ = ulysses_attention(*shards, call, with_lse=False)
        else:
            out, _ = ring_op(*shards, *flatten(call))
        counts.append(0)
        torch.autograd.grad(out, shards, local_of(case.grads()[0], own))
        return counts

    return play_group(ring.world_size, run)


def test_what_is_not_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="simulate_attention has no sums in a fixed order"):
        simulate_attention(Mask.causal(), FIXED_LEN, 2, (4, 4), 32, policy=FIXED)
