"""Blocks that move from pool to pool, and which of them and of columns move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import BlockPool, PagedBatch, PagedCache, RingError
from dtensor_ring.decode.plan import CacheTable
from dtensor_ring.handover.call import group_beside
from dtensor_ring.handover.pages import moving_blocks
from dtensor_ring.handover.plan import (
    MovedTokens,
    ShardMove,
    Side,
    block_moves,
    closed_and_open,
    column_moves,
)
from dtensor_ring.paged.page_memory import QuantisedPages, _tensors
from dtensor_ring.planning.run_table import as_layout
from tests.handover.test_hand_over import sent_bytes
from tests.paged.test_block_pool import Memory
from tests.pool import on_ranks

BLOCK, LAYERS, HEADS, DIMS = 16, 2, 2, (8, 4)
GROUPS = [([0], [1]), ([0, 1], [2]), ([0, 1, 2], [1, 2]), ([2], [0, 1])]
LENGTHS = (50, 16, 5)


def pool_on(ranks: list[int], kv_dtype: str | None) -> tuple[BlockPool, PagedCache | None]:
    pool, rank = BlockPool(20, BLOCK, len(ranks)), dist.get_rank()
    if rank not in ranks:
        return pool, None
    how = {"dtype": torch.bfloat16, "kv_dtype": kv_dtype, "value_head_dim": DIMS[1]}
    return pool, PagedCache(pool, HEADS, DIMS[0], LAYERS, ranks.index(rank), **how)


def write(cache: PagedCache | None, sequences: list[Any]) -> None:
    """The same numbers on all ranks."""
    for sequence in sequences:
        torch.manual_seed(sequence.number)
        for layer in range(LAYERS):
            pair = [torch.randn(1, HEADS, len(sequence), x).bfloat16() for x in DIMS]
            if cache is not None:
                PagedBatch(cache, [sequence], len(sequence)).write(layer, *pair)
        if cache is not None:
            cache.pool.commit(sequence)


def kept_bytes(lengths: tuple[int, ...], kv_dtype: str | None) -> int:
    """Of tokens in full units, with scales, and of the others."""
    total = 0
    for length in lengths:
        full = length // BLOCK if kv_dtype else 0
        total += 2 * HEADS * sum(DIMS) * (length - full * BLOCK)
        total += full * HEADS * (BLOCK * sum(DIMS) + 4 + 2 * 2 * DIMS[1])
    return LAYERS * total


def columns(cache: PagedCache | None, pairs: list[Any], side: int) -> dict[Any, Any]:
    """By layer, sequence and block: the tokens, and for full units the numbers as they are kept."""
    found: dict[Any, Any] = {}
    if cache is None:
        return found
    dealing, memory = cache.pool.dealing, cache._memory
    for layer in range(LAYERS):
        for number, pair in enumerate(pairs):
            sequence = pair[side]
            pieces = [x.split(BLOCK, 2) for x in cache.gather(layer, sequence)]
            mine = [n for n in range(sequence.num_blocks) if dealing.owner(n) == cache.rank]
            for at, block in enumerate(mine):
                kept = [x[at] for x in pieces]
                full = (block + 1) * BLOCK <= len(sequence)
                if isinstance(memory, QuantisedPages) and full:
                    unit = sequence.blocks[cache.rank][at] + layer * memory._num_units
                    kept += [x[unit] for q in memory._closed for x in _tensors(q)]
                    assert memory._slot[unit] < 0
                found[layer, number, block] = kept
    return found


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
@on_ranks(3)
def test_blocks_move(kv_dtype: str | None) -> None:
    group, rank = group_beside(init_device_mesh("cpu", (3,)).get_group()), dist.get_rank()
    for ranks in GROUPS:
        (one, given), (other, taken) = (pool_on(x, kv_dtype) for x in ranks)
        other.add([1] * 20)  # so that indices differ
        before = [other.add([x] * 5) for x in (2, 3)]
        write(taken, before)  # what was open in a block is of no use any more
        for sequence in before:
            other.free(sequence)
        pairs = [[pool.add([n] * n) for pool in (one, other)] for n in LENGTHS]
        write(given, [x for x, _ in pairs])
        moved = [MovedTokens(*pair, 0, len(pair[0])) for pair in pairs]
        with (
            sent_bytes() as sent,
            moving_blocks(
                group, torch.device("cpu"), moved, (one, other), ranks, (given, taken), {}
            ) as moving,
        ):
            if given is not None:
                for layer in range(LAYERS):
                    moving.send(layer)
            if rank == ranks[1][0]:
                moving.posts.tell([ranks[0][0]], torch.tensor([7]))
            heard = torch.zeros(1, dtype=torch.int64)
            if rank == ranks[0][0]:
                moving.posts.hear(ranks[1][0], heard)
        assert heard.item() == 7 * (rank == ranks[0][0])
        told: list[Any] = [None] * 3
        dist.all_gather_object(
            told, (sum(sent) - 8 * (rank == ranks[1][0]), columns(given, pairs, 0))
        )
        if not {*ranks[0]} & {*ranks[1]}:
            assert sum(x for x, _ in told) == kept_bytes(LENGTHS, kv_dtype)
        else:
            assert sum(x for x, _ in told) < kept_bytes(LENGTHS, kv_dtype)
        everything = {key: x for _, part in told for key, x in part.items()}
        for key, x in columns(taken, pairs, 1).items():
            assert all(map(torch.equal, x, everything[key])), key


@on_ranks(2)
def test_ranks_differ() -> None:
    """Ranks that move other blocks."""
    group = group_beside(init_device_mesh("cpu", (2,)).get_group())
    rank, ranks = dist.get_rank(), ([0], [1])
    (one, given), (other, taken) = (pool_on(x, None) for x in ranks)
    pair = [pool.add([3] * 40) for pool in (one, other)]
    write(given, pair[:1])
    moved = [MovedTokens(*pair, 0, 40 - 16 * rank)]

    def move() -> None:
        with moving_blocks(
            group, torch.device("cpu"), moved, (one, other), ranks, (given, taken), {}
        ) as moving:
            moving.send(0)
            moving.send(1)

    with pytest.raises(RingError, match="they differ in blocks that move"):
        move()


@st.composite
def tables(draw: st.DrawFn, seq_len: int) -> CacheTable:
    """Of tokens that came in any steps, with the last ones cropped."""
    table = CacheTable.empty(draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    while table.seq_len < seq_len:
        layout = as_layout(draw(st.sampled_from(["zigzag", "contiguous", "block_cyclic:3"])))
        number = draw(st.integers(1, 20))
        if draw(st.booleans()):
            table = table.append(number)
        else:
            table = table.append_sharded(layout, layout.dealt_length(number, table.world_size))
    return table.crop(seq_len)


@st.composite
def sides(draw: st.DrawFn, seq_len: int, num_shards: int) -> tuple[CacheTable, Side]:
    table = draw(tables(seq_len))
    ranks = draw(st.permutations(range(8)))
    each = [tuple(ranks[i :: table.world_size][:num_shards]) for i in range(table.world_size)]
    return table, Side(table.numbers, tuple(each))


@given(st.data(), st.integers(0, 40), st.integers(1, 2))
def test_each_column_moves_once(data: st.DataObject, seq_len: int, num_shards: int) -> None:
    before, source = data.draw(sides(seq_len, 1))
    after, target = data.draw(sides(seq_len, num_shards))
    found = {}
    for move in column_moves(source, target):
        shard = next(i for i, x in enumerate(source.ranks) if move.source in x)
        here = before.positions(shard)
        there = next(i for i, x in enumerate(target.ranks) if move.target in x)
        columns = [
            [c for a, b in cols.spans for c in range(a, b)]
            for cols in (move.source_cols(), move.target_cols())
        ]
        assert move.heads == (target.ranks[there].index(move.target), num_shards)
        for one, other in zip(*columns, strict=True):
            assert here[one] == after.positions(there)[other]
            assert (move.target, other) not in found
            found[move.target, other] = move.source
    assert len(found) == seq_len * num_shards


def test_sides_of_other_positions() -> None:
    one, other = (Side(np.array([[[0, n]]]), ((0,),)) for n in (8, 9))
    with pytest.raises(ValueError, match=r"one side holds positions \[\[0, 8\]\] and the other"):
        column_moves(one, other)


@pytest.mark.parametrize(
    ("cols", "num_cols"),
    [
        ([[0, 0, 60], [60, 64, 10]], (70, 128)),  # a block of two runs
        ([[0, 32, 64]], (64, 96)),  # beside another place
        ([[64, 0, 20]], (128, 20)),  # full there, and open here
    ],
)
def test_blocks_that_would_be_cut(cols: list[list[int]], num_cols: tuple[int, int]) -> None:
    move = ShardMove(0, 1, np.array(cols))
    with pytest.raises(ValueError, match=r'this hand-over would cut some: .*"whole_blocks:64"'):
        closed_and_open(move, 64, num_cols)


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_each_block_moves_once(one: int, other: int, lengths: list[int]) -> None:
    """The second pool holds a sequence before, so the indices of blocks differ."""
    pools = BlockPool(99, 4, one), BlockPool(99, 4, other)
    pools[1].add([9] * 11)
    memories = [[Memory(pool, rank) for rank in range(pool.dealing.world_size)] for pool in pools]
    moved = []
    for number, length in enumerate(lengths):
        tokens = [number * 50 + x for x in range(length)]
        pair = [pool.add(tokens) for pool in pools]
        for memory in memories[0]:
            memory.write(pair[0])
        begin = length // 2 // 4 * 4
        moved.append(MovedTokens(*pair, begin, length))
    ranks = [*range(one)], [*range(7 - other, 7)]
    for move in block_moves(moved, (pools[0].dealing, pools[1].dealing), ranks):
        source, target = memories[0][move.source], memories[1][move.target - 7 + other]
        for here, there, num_tokens in move.blocks.tolist():
            for place in range(num_tokens):
                assert (there, place) not in target._content
                target._content[there, place] = source._content[here, place]
    for tokens in moved:
        for memory in memories[1]:
            for position, found in memory.read(tokens.target):
                assert found == (
                    tokens.target.tokens[position] if position >= tokens.begin else None
                )


def test_pools_of_other_blocks() -> None:
    with pytest.raises(ValueError, match="blocks of the same size, got 4 and 8 tokens"):
        block_moves([], tuple(BlockPool(4, x).dealing for x in (4, 8)), ([0], [0]))
