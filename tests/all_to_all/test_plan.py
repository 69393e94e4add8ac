"""Exchanges of tokens and heads: played by all ranks, packed, and between processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring import BlockCyclic, Contiguous, RingError, Striped, ZigZag
from dtensor_ring.all_to_all import run
from dtensor_ring.all_to_all.op import all_to_all_op, flatten_all_to_all
from dtensor_ring.all_to_all.plan import AllToAllPlan, all_to_all_plan, head_shard_of
from dtensor_ring.all_to_all.run import ALIGNED, AllToAllMessages, TensorShape, aligned, messages_of
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.ranges import Span
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.transport.transport import ProcessGroupTransport, set_transport
from tests.all_to_all.test_op import CASES, Case
from tests.layouts import LAYOUTS
from tests.played_group import PlayedGroup, play_group
from tests.pool import Pool, on_ranks

HEADS = (8, 8), (8, 4), (28, 4), (9, 3), (16, 1), (10, 5), (14, 2)
"""Query and key heads."""


def uneven(world_size: int, seq_len: int) -> RunTable:
    """A batch whose last rank has nothing, and whose first has both ends."""
    middle = max(1, world_size - 2)
    bounds = [1 + (seq_len - 2) * i // middle for i in range(middle + 1)]
    inner = [[(a, b - a)] for a, b in pairwise(bounds)]
    rows = [[(0, 1), (seq_len - 1, 1)], *inner, []]
    return RunTable(rows[:world_size] if world_size > 2 else [[(0, seq_len)], []][:world_size])


def exchanges(
    layout: Layout, to: Layout, heads: int, world_size: int, seq_len: int
) -> list[AllToAllPlan]:
    return [
        all_to_all_plan(layout, to, heads, rank, world_size, seq_len) for rank in range(world_size)
    ]


def spans(plan: AllToAllPlan, num_heads: int, num_key_heads: int, peer: int) -> range:
    return range(*plan.head_shard(peer, num_key_heads).span(num_heads, num_key_heads))


def sent(plan: AllToAllPlan, *heads: int) -> dict[int, tuple[int, int]]:
    """Tokens and heads of a tensor that go to each peer; heads are of the tensor, and of keys."""
    others = [x for x in plan.sends if x.peer != plan.rank]
    return {x.peer: (len(x.cols), len(spans(plan, *heads, x.peer))) for x in others}


def received(plan: AllToAllPlan, *heads: int) -> dict[int, tuple[int, int]]:
    others, own = [x for x in plan.receives if x.peer != plan.rank], spans(plan, *heads, plan.rank)
    return {x.peer: (len(x.cols), len(own)) for x in others}


def indices(spans: Iterable[Span]) -> list[int]:
    return [i for span in spans for i in range(*span)]


PLAYED = [
    (layout, to, heads, world_size, seq_len)
    for world_size, seq_len in (
        (1, 5),
        (2, 16),
        (3, 24),
        (4, 48),
        (6, 24),
        (8, 64),
        (4, 13),
        (4, 2),
    )
    for heads in range(1, world_size + 1)
    if world_size % heads == 0
    for layout, to in product((*LAYOUTS, uneven(world_size, seq_len)), repeat=2)
    if not (Striped() in (layout, to) and seq_len % world_size)
    if not (seq_len < 4 and {layout, to} & {uneven(world_size, seq_len)})
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_each_rank_gets_the_tokens_and_heads_of_its_group(world_size: int) -> None:
    for layout, to, heads, size, seq_len in PLAYED:
        if size != world_size:
            continue
        plans = exchanges(layout, to, heads, size, seq_len)
        before = [layout.positions(rank, size, seq_len) for rank in range(size)]
        after = [
            sorted(p for x in range(rank // heads * heads, rank // heads * heads + heads)
                   for p in to.positions(x, size, seq_len))
            for rank in range(size)
        ]  # fmt: skip
        for rank, plan in enumerate(plans):
            assert plan.num_tokens == (len(before[rank]), len(after[rank]))
            got: dict[int, int] = {}
            for source, cols in plan.receives:
                (sent,) = [x for x in plans[source].sends if x.peer == rank]
                taken = [before[source][i] for i in indices(sent.cols.spans)]
                at = indices(cols.spans)
                assert not got.keys() & set(at)
                got |= dict(zip(at, taken, strict=True))
            assert [got[i] for i in range(len(got))] == after[rank], (layout, to, heads, rank)
            peers = [x.peer for x in plan.sends]
            assert len(peers) == len(set(peers)), "one message for each peer"
            for peer in peers:
                assert rank in [x.peer for x in plans[peer].receives]


@pytest.mark.parametrize(("num_heads", "num_key_heads"), HEADS)
def test_heads_are_sharded_once_and_stay_with_their_key_head(
    num_heads: int, num_key_heads: int
) -> None:
    for num_ranks in range(1, num_heads + 1):
        shards = [head_shard_of(member, num_ranks, num_key_heads) for member in range(num_ranks)]
        queries = [range(*shard.span(num_heads, num_key_heads)) for shard in shards]
        keys = [range(*shard.span(num_key_heads, num_key_heads)) for shard in shards]
        assert [head for part in queries for head in part] == [*range(num_heads)]
        assert {head for part in keys for head in part} == {*range(num_key_heads)}
        group = num_heads // num_key_heads
        for shard, of_query, of_key in zip(shards, queries, keys, strict=True):
            assert of_query, "no rank is without a head"
            # Grouped-query attention of these heads alone pairs them as that of all heads does.
            inner = len(of_query) // len(of_key)
            assert len(of_query) == inner * len(of_key)
            pairs = [of_key[i // inner] for i in range(len(of_query))]
            assert pairs == [head // group for head in of_query]
            same = [other for other in keys if other == of_key]
            assert shard.is_copied(num_key_heads, num_key_heads) == (len(same) > 1)
            assert not shard.is_copied(num_heads, num_key_heads) or num_heads == num_key_heads
        sizes = [len(part) for part in keys]
        assert num_key_heads < num_ranks or max(sizes) - min(sizes) <= 1


def test_relayout_moves_only_what_changes_its_rank() -> None:
    for layout, to, heads, size, seq_len in PLAYED:
        if heads > 1:
            continue
        for rank, plan in enumerate(exchanges(layout, to, 1, size, seq_len)):
            before = {*layout.positions(rank, size, seq_len)}
            after = {*to.positions(rank, size, seq_len)}
            assert sum(tokens for tokens, _ in sent(plan, 1, 1).values()) == len(before - after)
            assert sum(tokens for tokens, _ in received(plan, 1, 1).values()) == len(after - before)


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_messages_are_as_large_as_the_formula_says(heads: int) -> None:
    """A rank keeps one part of `heads` of what it has; strategies.md, 1.1."""
    for plan in exchanges(ZigZag(), ZigZag(), heads, 8, 128):
        assert [*sent(plan, 32, 8).values()] == [(16, 32 // heads)] * (heads - 1)
        group = range(plan.rank // heads * heads, plan.rank // heads * heads + heads)
        expected = {peer: (16, 8 // heads) for peer in group if peer != plan.rank}
        assert sent(plan, 8, 8) == expected
        assert received(plan, 8, 8) == expected


def test_what_a_rank_sends_is_what_its_peer_receives() -> None:
    for (num_heads, num_key_heads), to in product(HEADS, (ZigZag(), BlockCyclic(2), uneven(6, 48))):
        for heads in (1, 2, 3, 6):
            plans = exchanges(ZigZag(), to, heads, 6, 48)
            for plan in plans:
                for kind in {num_heads, num_key_heads}:
                    for peer, amount in sent(plan, kind, num_key_heads).items():
                        assert received(plans[peer], kind, num_key_heads)[plan.rank] == amount


def test_a_key_head_goes_to_all_ranks_that_have_its_query_heads() -> None:
    plan = all_to_all_plan(Contiguous(), Contiguous(), 8, 0, 8, 16)
    assert {heads for _, heads in sent(plan, 4, 4).values()} == {1}
    assert [heads for _, heads in sent(plan, 28, 4).values()] == [4, 3, 4, 3, 4, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((3, 8, 16), r"divides the 8 of the axis, got 3; these do: \[1, 2, 4, 8\]"),
        ((0, 8, 16), "got 0"),
        ((16, 8, 16), "got 16"),
    ],
)
def test_groups_divide_the_axis(arguments: tuple[int, int, int], match: str) -> None:
    heads, world_size, seq_len = arguments
    with pytest.raises(ValueError, match=match):
        all_to_all_plan(ZigZag(), ZigZag(), heads, 0, world_size, seq_len)


def test_heads_that_cannot_be_sharded() -> None:
    shard = head_shard_of(0, 6, 2)
    with pytest.raises(ValueError, match="each has to get a head"):
        shard.span(4, 2)
    with pytest.raises(ValueError, match="must be a multiple"):
        shard.span(5, 2)


# The messages of an exchange: how they are packed, and from tensors in which order.


@pytest.mark.parametrize("name", ["one key head", "uneven tokens", "dtypes"])
def test_tensors_may_lie_in_any_order(name: str) -> None:
    case = CASES[name]

    def run(group: PlayedGroup) -> None:
        given = case.before(group.rank())
        for is_back in (False, True):
            options = flatten_all_to_all(case.args(group.group_name, is_back=is_back))
            expected = all_to_all_op(given, *options)
            for tensors in orders(given):
                for found, wanted in zip(all_to_all_op(tensors, *options), expected, strict=True):
                    assert torch.equal(found, wanted)
            given = expected

    play_group(case.world_size, run)


def orders(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The same numbers head by head, token by token, and with gaps in each dimension."""
    yield [x.contiguous() for x in tensors]
    yield [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for dim in range(1, 5):
        yield [torch.stack([x, x], dim).select(dim, 0) for x in tensors]


def planned(
    num_heads: tuple[int, ...], itemsizes: tuple[int, ...], is_back: bool
) -> AllToAllMessages:
    """Rank 0 of four, with 16 tokens of 64 and two rows; heads have three numbers."""
    plan = all_to_all_plan(ZigZag(), ZigZag(), 4, 0, 4, 64)
    shapes = tuple(TensorShape(2, 3, itemsize) for itemsize in itemsizes)
    return messages_of(plan, num_heads, num_heads[-1], shapes, is_back)


@pytest.mark.parametrize("is_back", [False, True])
def test_each_peer_gets_one_message(is_back: bool) -> None:
    """Messages lie one after the other, and the tensors of one without gaps, the widest first."""
    found = planned((8, 4), (2, 8), is_back)
    for side in (found.sends, found.receives):
        assert [peer for peer, _ in side.messages] == [1, 2, 3]
        for peer, (begin, end) in side.messages:
            assert begin % ALIGNED == 0
            copies = [x for x in side.copies if x.peer == peer]
            assert [x.part.number for x in copies] == [1, 0]
            bounds = [begin, *(x.span[1] for x in copies)]
            assert [x.span[0] for x in copies] == bounds[:-1]
            assert bounds[-1] == end
        assert side.num_bytes == sum(aligned(end - begin) for _, (begin, end) in side.messages)


def test_peers_that_get_the_same_share_one_copy() -> None:
    """One head, of which each rank gets a copy: it is packed once, and received from each."""
    found = planned((1,), (4,), is_back=False)
    num_bytes = 2 * 16 * 3 * 4
    assert list(found.sends.messages) == [(peer, (0, num_bytes)) for peer in (1, 2, 3)]
    assert len(found.sends.copies) == 1
    assert len(found.receives.copies) == 3
    back = planned((1,), (4,), is_back=True)
    assert len(back.receives.copies) == 3, "copies that are summed"


def test_nothing_empty_travels() -> None:
    plan = all_to_all_plan(ZigZag(), ZigZag(), 4, 0, 4, 64)
    found = messages_of(plan, (4,), 4, (TensorShape(0, 3, 4),))
    assert not found.sends.messages + found.receives.messages
    assert not found.sends.num_bytes + found.receives.num_bytes


# Exchanges between processes, one after another, and what of them fails on all ranks.


def _options(case: Case) -> tuple[Any, ...]:
    group = dist.group.WORLD
    assert group is not None
    return flatten_all_to_all(case.args(group.group_name))


def _check_turn(case: Case, turn: int) -> None:
    """There and back, with content that no other turn has."""
    rank = dist.get_rank()
    inputs, expected = case.before(rank), case.after(rank)
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    results = all_to_all_op([x * turn for x in inputs], *_options(case))
    for found, wanted in zip(results, expected, strict=True):
        assert torch.equal(found, wanted * turn)
    used = [(i, x) for i, x in enumerate(results) if x.requires_grad]
    grads = torch.autograd.grad(
        [x for _, x in used], [inputs[i] for i, _ in used], [x.detach() for _, x in used]
    )
    for (i, _), grad in zip(used, grads, strict=True):
        by_hand = inputs[i] * turn * case.copies(i) * turn
        assert torch.equal(grad, by_hand.to(grad.dtype).detach())


def _three_turns(case: Case) -> None:
    for turn in range(1, 4):  # memory serves again
        _check_turn(case, turn)


# Threads do so in tests/all_to_all/test_op.py, in all cases.
@pytest.mark.parametrize("name", [x for x, c in CASES.items() if c.world_size in (2, 4)][::3])
def test_processes_exchange(pool: Pool, name: str) -> None:
    pool.run(CASES[name].world_size, _three_turns, CASES[name])


@on_ranks(4)
def test_exchanges_with_other_peers_take_turns() -> None:
    cases = [
        Case(ZigZag(), ZigZag(), 2, 4, 24),
        Case(ZigZag(), Striped(), 1, 4, 24),
        Case(ZigZag(), ZigZag(), 4, 4, 24),
    ]
    for turn in range(1, 7):
        for case in cases:
            _check_turn(case, turn)


@on_ranks(2)
def test_memory_is_not_written_to_before_it_was_read() -> None:
    """Rank 1 reads late; rank 0 has gone on by then."""
    unpack = run._unpack

    def late(*args: Any) -> None:
        time.sleep(0.05 if dist.get_rank() else 0)
        unpack(*args)

    with patch.object(run, "_unpack", late):
        for turn in range(1, 7):
            _check_turn(CASES["zigzag to zigzag, 2 of 2"], turn)


@on_ranks(4, timeout=60)
def test_an_error_of_all_ranks_leaves_the_group_as_it_is() -> None:
    """All ranks fail before they send, as without memory; the next call is as ever."""
    case = CASES["zigzag to zigzag, 2 of 4"]
    for turn in range(1, 4):
        with patch.object(run, "pack", side_effect=MemoryError("none")), pytest.raises(MemoryError):
            all_to_all_op(case.before(dist.get_rank()), *_options(case))
        _check_turn(case, turn)


class Own(ProcessGroupTransport):
    """As a user's, which sends in its own way."""


@on_ranks(3)
def test_ranks_with_other_transports_are_reported() -> None:
    case = CASES["two key heads on three"]
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    if rank == 1:
        set_transport(group, Own(group))
    with pytest.raises(RingError) as found:
        all_to_all_op(case.before(rank), *_options(case))
    text = str(found.value)
    assert "they differ in transport" in text, text
