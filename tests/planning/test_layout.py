"""Layouts shard every position once, in the shard sizes of DTensor."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring.planning.layout import (
    BlockCyclic,
    Contiguous,
    Layout,
    Run,
    Striped,
    ZigZag,
    shard_length,
)
from dtensor_ring.planning.run_table import RunTable, as_layout
from tests.layouts import LAYOUTS
from tests.planning.test_layout_spec import SPECS

NUM_RUNS = {"contiguous": 1, "striped": 1, "zigzag": 2}  # of equal length, at a padded length


@st.composite
def shard_tables(draw: st.DrawFn) -> tuple[Layout, int, int]:
    """A layout, a world size, and a length that the layout shards to it."""
    layout = draw(st.sampled_from(LAYOUTS))
    world_size, seq_len = draw(st.integers(1, 6)), draw(st.integers(0, 60))
    if isinstance(layout, Striped):
        seq_len -= seq_len % world_size
    return layout, world_size, seq_len


def positions(layout: Layout, world_size: int, seq_len: int) -> list[list[int]]:
    return [layout.positions(rank, world_size, seq_len) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("layout", "world_size", "seq_len", "expected"),
    [
        (Contiguous(), 2, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Contiguous(), 4, 5, [[0, 1], [2, 3], [4], []]),
        (Striped(), 3, 6, [[0, 3], [1, 4], [2, 5]]),
        (ZigZag(), 2, 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (ZigZag(), 3, 9, [[0, 1, 8], [2, 3, 7], [4, 5, 6]]),
        (ZigZag(), 4, 5, [[0, 4], [1, 3], [2], []]),
        (ZigZag(), 1, 3, [[0, 1, 2]]),
        (ZigZag(), 2, 0, [[], []]),
        (RunTable((((0, 2), (6, 2)), ((2, 4), (0, 0)))), 2, 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (RunTable((((3, 2),), ((0, 1), (2, 1)), ((1, 1),))), 3, 5, [[3, 4], [0, 2], [1]]),
        (RunTable(((), ())), 2, 0, [[], []]),
        (RunTable((((0, 1),), (), ((1, 4),))), 3, 5, [[0], [], [1, 2, 3, 4]]),
        (RunTable((((3, 2),), ((2, 1),))), 2, 5, [[3, 4], [2]]),
    ],
)
def test_positions(
    layout: Layout, world_size: int, seq_len: int, expected: list[list[int]]
) -> None:
    assert positions(layout, world_size, seq_len) == expected


@given(shard_tables())
def test_positions_partition_the_sequence_as_torch_chunk_does(
    sharding: tuple[Layout, int, int],
) -> None:
    _, world_size, seq_len = sharding
    sharded = positions(*sharding)
    assert sorted(chain.from_iterable(sharded)) == list(range(seq_len))
    sizes = [len(chunk) for chunk in torch.arange(seq_len).chunk(world_size)]
    sizes += [0] * (world_size - len(sizes))
    assert [len(shard) for shard in sharded] == sizes
    assert [shard_length(rank, world_size, seq_len) for rank in range(world_size)] == sizes


@given(shard_tables())
def test_no_run_is_empty(sharding: tuple[Layout, int, int]) -> None:
    layout, world_size, seq_len = sharding
    for rank in range(world_size):
        assert all(run.length > 0 for run in layout.runs(rank, world_size, seq_len))


@given(
    run=st.builds(Run, st.integers(0, 30), st.integers(1, 12), st.integers(1, 5)),
    begin=st.integers(0, 100),
    length=st.integers(0, 40),
)
def test_run_indices(run: Run, begin: int, length: int) -> None:
    inside = [i for i in range(run.length) if run.position(i) in range(begin, begin + length)]
    assert list(range(*run.indices(begin, begin + length))) == inside


def is_sharded(layout: Layout, world_size: int, seq_len: int) -> bool:
    try:
        return len(positions(layout, world_size, seq_len)) == world_size
    except ValueError:
        return False


@pytest.mark.parametrize("name", NUM_RUNS)
@given(seq_len=st.integers(0, 60), world_size=st.integers(1, 6))
def test_padded_length_is_the_next_even_one(name: str, seq_len: int, world_size: int) -> None:
    layout = as_layout(name)
    padded = layout.padded_length(seq_len, world_size)
    num_chunks = NUM_RUNS[name] * world_size
    assert padded == next(n for n in range(seq_len, 200) if n % num_chunks == 0)
    runs = [layout.runs(rank, world_size, padded) for rank in range(world_size)]
    lengths = [run.length for shard in runs for run in shard]
    assert lengths == [padded // num_chunks] * (num_chunks if padded else 0)


@given(seq_len=st.integers(0, 60), world_size=st.integers(1, 6), block=st.integers(1, 9))
def test_blocks_there_and_back_are_even(seq_len: int, world_size: int, block: int) -> None:
    layout = BlockCyclic(block)
    padded = layout.padded_length(seq_len, world_size)
    assert padded == next(n for n in range(seq_len, 200) if n % (2 * world_size) == 0)
    sharded = positions(layout, world_size, padded)
    assert len({len(shard) for shard in sharded}) == 1
    assert len({sum(shard) for shard in sharded}) == 1, "under a causal mask, that is the work"
    lengths = [run.length for run in layout.runs(0, world_size, 200)]
    assert max(lengths[:-2], default=0) % block == 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=SPECS)
@given(seq_len=st.integers(0, 60), world_size=st.integers(1, 6))
def test_dealt_length_leaves_no_rank_without_tokens(
    layout: Layout, seq_len: int, world_size: int
) -> None:
    assert layout.dealt_length(seq_len, world_size) == next(
        n
        for n in range(seq_len, 200)
        if is_sharded(layout, world_size, n) and all(positions(layout, world_size, n))
    )


def test_striped_says_which_length_to_pad_to() -> None:
    message = (
        "the striped layout needs a sequence length that is a multiple of the 4 ranks of the "
        "ring, got 10; pad it to 12 tokens or use zigzag or contiguous"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Striped().runs(0, 4, 10)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((((0, 2),), ((3, 2),)), "runs must hold each position once, not so position 2"),  # a gap
        ((((0, 3),), ((2, 3),)), "each position once, not so position 2"),  # an overlap
        ((((0, 2),), ((0, 2),)), "each position once, not so position 0"),
        ((((-2, 4),),), r"runs must be from 0 to 2,147,483,647, got \[-2, 4\]"),
        ((((0, 4), (4, -2)),), r"from 0 to 2,147,483,647, got \[4, -2\]"),
        ((((2**31 - 1, 1),),), r"from 0 to 2,147,483,647, got \[2147483647, 1\]"),
        ((((2, 1), (0, 1)), ((1, 1),)), "runs of a rank must be in ascending order"),
    ],
)
def test_runs_that_shard_no_sequence(
    table: tuple[tuple[tuple[int, int], ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RunTable(table).runs(0, len(table), 5)


def test_what_fills_a_table_up_says_nothing() -> None:
    table = RunTable([[(0, 2), (6, 2)], [(2, 4)]])
    assert table == RunTable(np.array([[[0, 2], [9, 0], [6, 2]], [[0, 0], [2, 4], [1, 0]]]))
    assert hash(table) == hash(RunTable([[(0, 2), (6, 2)], [(0, 0), (2, 4)]]))
    assert table != RunTable([[(0, 2), (6, 2)], [(2, 4)], []]), "a rank more"
    assert repr(table) == "RunTable([[(0, 2), (6, 2)], [(2, 4)]])"
    assert (table.begin, table.end, table.missing) == (0, 8, None)
    assert table.held(1, 2) == (Run(2, 4),)


@pytest.mark.parametrize(("world_size", "seq_len"), [(3, 4), (1, 4), (2, 5), (2, 2)])
def test_runs_of_another_sequence_or_ring(world_size: int, seq_len: int) -> None:
    message = (
        f"runs shard 4 tokens over 2 ranks, not {seq_len} tokens over {world_size}; make a layout"
    )
    with pytest.raises(ValueError, match=message):
        RunTable((((0, 2),), ((2, 2),))).runs(0, world_size, seq_len)


@pytest.mark.parametrize("wrong", [2.0, "2", True, None])
def test_blocks_are_integers(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"block counts tokens, an int, got {wrong!r}"):
        BlockCyclic(wrong)
