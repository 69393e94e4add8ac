"""Layouts and their names: each position is sharded once, and broken promises are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring import Balanced, Mask
from dtensor_ring.planning.layout import (
    BlockCyclic,
    Contiguous,
    Joined,
    Layout,
    Run,
    Striped,
    ZigZag,
    shard_length,
)
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.run_table import PerBatch, RunTable, as_layout, shard_table
from tests.layouts import LAYOUTS

NUM_RUNS = {"contiguous": 1, "striped": 1, "zigzag": 2}  # of equal length, at a padded length

SPECS = [layout.spec for layout in LAYOUTS]


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


# Layouts by their names, and what names none.

BELONGS_TO_BATCH = "the balanced layout belongs to one batch, so it is passed with it"


@dataclass(frozen=True)
class Impostor(Contiguous):
    """Not a layout of ours, in spite of its name."""

    shift: int = 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=SPECS)
def test_as_layout(layout: Layout) -> None:
    assert as_layout(layout) is layout
    assert as_layout(layout.spec) == layout


def test_specs() -> None:
    assert SPECS[:4] == ["contiguous", "striped", "zigzag", "block_cyclic:2"]
    assert not any(layout.per_batch for layout in LAYOUTS)
    assert RunTable.per_batch
    assert Balanced.per_batch


def test_layouts_of_a_batch() -> None:
    """By name they stand for any of them, which shards nothing; by value they are themselves."""
    layout = as_layout("balanced")
    assert (layout, layout.per_batch, layout.spec) == (PerBatch(), True, "balanced")
    with pytest.raises(ValueError, match=BELONGS_TO_BATCH):
        layout.runs(0, 2, 8)
    for made in (Balanced(Mask.causal(), 8, 2), RunTable((((0, 4),), ((4, 4),)))):
        assert as_layout(made) is made


KNOWN = "known layouts: contiguous, striped, zigzag, block_cyclic:<block>, whole_blocks:<block>$"


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("ring", ValueError, f"unknown layout 'ring'; {KNOWN}"),
        (Impostor(), ValueError, rf"unknown layout Impostor\(shift=1\); {KNOWN}"),
        (2, TypeError, "a layout is a Layout or its name, got int"),
        (None, TypeError, "a layout is a Layout or its name, got NoneType"),
        ("block_cyclic", ValueError, f"'block_cyclic' .*takes 1 parameters, got 0.; {KNOWN}"),
        ("block_cyclic:", ValueError, f"'block_cyclic:' has wrong parameters .*; {KNOWN}"),
        ("block_cyclic:2,3", ValueError, f"takes 1 parameters, got 2.; {KNOWN}"),
        ("block_cyclic:two", ValueError, f"invalid literal for int.*; {KNOWN}"),
        ("block_cyclic:0", ValueError, f"a block holds at least one token, got 0.; {KNOWN}"),
        ("zigzag:2", ValueError, f"'zigzag:2' .*takes 0 parameters, got 1.; {KNOWN}"),
    ],
)
def test_as_layout_refuses(wrong: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_layout(wrong)  # type: ignore[arg-type]


# Layouts are sharded as they promise: broken promises are refused.


@dataclass(frozen=True)
class Written(Layout):
    """Whatever runs one writes down."""

    shards: tuple[tuple[Run, ...], ...]
    name = "written"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        return self.shards[rank]


@given(shard_tables())
def test_shard_table_has_all_runs(sharding: tuple[Layout, int, int]) -> None:
    layout, world_size, seq_len = sharding
    sharded = shard_table(layout, world_size, seq_len)
    assert shard_table(layout, world_size, seq_len) is sharded, "once"
    columns = zip(sharded.starts, sharded.lengths, sharded.owners, sharded.cols, strict=True)
    for start, run_length, owner, col in columns:
        expected = [start + i * sharded.stride for i in range(run_length)]
        held = layout.positions(owner, world_size, seq_len)
        assert held[col : col + run_length] == expected
    assert sum(sharded.lengths) == seq_len
    assert [sharded.num_local(rank) for rank in range(world_size)] == [
        shard_length(rank, world_size, seq_len) for rank in range(world_size)
    ]


BROKEN = [
    ([[(2, 2), (0, 2)], [(4, 4)]], "the runs of rank 0 do not ascend, Run(start=0"),
    ([[(0, 2), (1, 2)], [(4, 4)]], "the runs of rank 0 do not ascend, Run(start=1"),
    ([[(0, 3, 2), (3, 1, 2)], [(1, 4, 2)]], "the runs of rank 0 do not ascend, Run(start=3"),
    ([[(0, 0), (0, 4)], [(4, 4)]], "rank 0 has an empty run, Run(start=0, length=0"),
    ([[(0, 4)], [(4, 4, 0)]], "rank 1 has an empty run, Run(start=4, length=4, stride=0"),
    ([[(0, 3)], [(3, 5)]], "rank 0 has 3 tokens, but its shard has 4"),
    ([[], [(0, 8)]], "rank 0 has 0 tokens, but its shard has 4"),
    ([[(0, 4)], [(3, 4)]], "rank 1 has Run(start=3, length=4, stride=1), so that position 3 is"),
    ([[(1, 4)], [(5, 3), (8, 1)]], "rank 1 has Run(start=8, length=1, stride=1), outside of the"),
    ([[(0, 3), (7, 1)], [(4, 4)]], "rank 1 has Run(start=4, length=4, stride=1), so that posit"),
    ([[(0, 4)], [(5, 4)]], "rank 1 has Run(start=5, length=4, stride=1), outside of the sequence"),
    ([[(-1, 4)], [(3, 4)]], "rank 0 has Run(start=-1, length=4, stride=1), outside of the seq"),
    ([[(0, 4, 2)], [(1, 4)]], "rank 1 has a run of stride 1, others have stride 2"),
    ([[(0, 4, 2)], [(0, 4, 2)]], "rank 1 has Run(start=0, length=4, stride=2), so that position"),
    ([[(0, 4, 2)], [(3, 3, 2), (9, 1, 2)]], "rank 1 has Run(start=9, length=1, stride=2), outs"),
]


@pytest.mark.parametrize(("shards", "message"), BROKEN)
def test_broken_promises(shards: list[list[tuple[int, ...]]], message: str) -> None:
    layout = Written(tuple(tuple(Run(*run) for run in shard) for shard in shards))
    for refuse in (lambda: shard_table(layout, 2, 8), lambda: plan(layout, Mask.causal(), 0, 2, 8)):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            refuse()
        prefix = f"{layout!r} breaks the promise of Layout.runs for 8 tokens on 2 ranks: rank "
        assert str(caught.value).replace("the runs of rank", "rank").startswith(prefix)


@given(st.data())
def test_no_broken_promise_passes(data: st.DataObject) -> None:
    """Runs drawn at random either shard every position once, in order, or are refused."""
    stride = data.draw(st.integers(1, 3))
    run = st.builds(Run, st.integers(-1, 9), st.integers(0, 4), st.just(stride))
    shards = data.draw(st.lists(st.lists(run, max_size=3).map(tuple), min_size=2, max_size=2))
    layout = Written(tuple(shards))
    sharded = positions(layout, 2, 6)
    lasts = [(a.last, b.start) for shard in shards for a, b in pairwise(shard)]
    keeps = (
        sorted(chain.from_iterable(sharded)) == list(range(6))
        and [len(shard) for shard in sharded] == [3, 3]
        and all(run.length for shard in shards for run in shard)
        and all(last < start for last, start in lasts)
    )
    assert is_accepted(layout) == keeps


def is_accepted(layout: Layout) -> bool:
    try:
        shard_table(layout, 2, 6)
    except ValueError:
        return False
    return True


# What groups hold together: all tokens of their ranks, in the order of positions.


@given(shard_tables(), st.integers(1, 4), st.booleans())
def test_groups_hold_what_their_ranks_hold(
    sharding: tuple[Layout, int, int], heads: int, balanced: bool
) -> None:
    layout, num_groups, seq_len = sharding
    world_size = num_groups * heads
    if isinstance(layout, Striped):
        seq_len *= heads
    if balanced:
        layout = Balanced(Mask.causal(), seq_len, world_size, None, 3)
    joined = Joined(layout, heads)
    for group in range(num_groups):
        ranks = range(group * heads, (group + 1) * heads)
        held = sorted(x for rank in ranks for x in layout.positions(rank, world_size, seq_len))
        assert joined.positions(group, num_groups, seq_len) == held
        assert joined.num_tokens(group, num_groups, seq_len) == len(held)
    # The planner finds no fault with the runs, of which it promises that neighbours are one.
    sharded = shard_table(joined, num_groups, seq_len)
    assert sharded.shards == tuple(
        joined.runs(group, num_groups, seq_len) for group in range(num_groups)
    )


@pytest.mark.parametrize("layout", [ZigZag(), Striped()])
def test_a_group_of_all_ranks_has_one_run(layout: Layout) -> None:
    assert Joined(layout, 4).runs(0, 1, 32) == (Run(0, 32),)
