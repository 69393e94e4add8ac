"""Which columns and blocks move, against their positions one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring import BlockPool
from dtensor_ring.decode.plan import CacheTable
from dtensor_ring.handover.plan import (
    MovedTokens,
    ShardMove,
    Side,
    block_moves,
    closed_and_open,
    column_moves,
)
from dtensor_ring.planning.run_table import as_layout
from tests.paged.pools import Memory


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
    """Both pools begin with sequences of their own, so indices differ."""
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
