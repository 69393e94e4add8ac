"""Exchanges of tokens and heads: who has what before and after, played by all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, product

import pytest

from dtensor_ring import BlockCyclic, Contiguous, Striped, ZigZag
from dtensor_ring.all_to_all.plan import AllToAllPlan, all_to_all_plan, head_shard_of
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.ranges import Span
from dtensor_ring.planning.run_table import RunTable
from tests.layouts import LAYOUTS

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


CASES = [
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
    for layout, to, heads, size, seq_len in CASES:
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
    for layout, to, heads, size, seq_len in CASES:
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
