"""Tables of growing sequences, against a list of owners."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Balanced, BlockCyclic, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.decode.plan import CacheTable
from dtensor_ring.planning.run_table import MARKED, RunTable
from tests.drawn import examples

LAYOUTS = [Contiguous(), ZigZag(), BlockCyclic(3)]

Turn = tuple[str, Any, int]
"""What is done, the layout if the append step is sharded, and a number of tokens."""


def turns() -> st.SearchStrategy[list[Turn]]:
    dealt = st.tuples(st.just("dealt"), st.sampled_from(LAYOUTS), st.integers(0, 40))
    single = st.tuples(st.just("single"), st.none(), st.integers(0, 9))
    crop = st.tuples(st.just("crop"), st.none(), st.integers(0, 30))
    return st.lists(dealt | single | crop, max_size=12)


def grown(table: CacheTable, turn: Turn) -> CacheTable:
    kind, layout, number = turn
    if kind == "crop":
        return table.crop(max(0, table.seq_len - number))
    return table.append_sharded(layout, number) if kind == "dealt" else table.append(number)


def owners_after(owners: list[int], table: CacheTable, turn: Turn, world_size: int) -> list[int]:
    """Owners of all positions, of which single tokens' are for the table to choose."""
    kind, layout, number = turn
    if kind == "crop":
        return owners[: max(0, len(owners) - number)]
    if kind == "single":
        return owners + owners_of(table)[len(owners) :]
    dealt = np.empty(number, dtype=np.int64)
    for rank in range(world_size):
        dealt[layout.positions(rank, world_size, number)] = rank
    return owners + dealt.tolist()


def owners_of(table: CacheTable) -> list[int]:
    """Checks that each position is held once."""
    owners = [-1] * table.seq_len
    for rank in range(table.world_size):
        for position in table.positions(rank).tolist():
            assert owners[position] == -1
            owners[position] = rank
    assert -1 not in owners
    return owners


@pytest.mark.parametrize("num_runs", [1, 8, 16])
def test_marks(num_runs: int) -> None:
    """Tables with a mark say the same of positions, and differ from those with another one."""
    table = CacheTable.empty(2, 1).append(2 * num_runs)
    assert table.num_runs == (num_runs, num_runs), "a token here, a token there"
    plain, marked, other = (RunTable(table.marked(mark)) for mark in (0, 7, 8))
    assert np.array_equal(table.marked(0), table.numbers)
    assert np.array_equal(plain.numbers, marked.numbers)
    assert [x.mark for x in (plain, marked, other)] == [0, MARKED + 7, MARKED + 8]
    assert marked == RunTable(table.marked(7))
    assert plain != marked != other


def check(table: CacheTable, owners: list[int]) -> None:
    """All that a table says, against the owner of each position."""
    assert owners_of(table) == owners
    numbers = table.numbers
    assert (numbers.dtype, numbers.shape[::2]) == (np.dtype("int32"), (table.world_size, 2))
    for rank in range(table.world_size):
        held = [position for position, owner in enumerate(owners) if owner == rank]
        assert table.positions(rank).tolist() == held
        assert table.num_local[rank] == len(held)
        runs = table.runs[rank]
        assert [tuple(run) for run in numbers[rank].tolist() if run[1]] == list(runs)
        assert all(start + length < begin for (start, length), (begin, _) in pairwise(runs))
        for begin in {0, len(owners) // 3, len(owners) - 1, len(owners)}:
            after = [position for position in held if position >= begin]
            assert table.num_before(rank, begin) == len(held) - len(after)
            parts = [range(start, start + length) for start, length in table.runs_from(rank, begin)]
            assert [position for part in parts for position in part] == after
            turn = [tuple(run) for run in table.numbers_from(begin)[rank].tolist() if run[1]]
            assert turn == table.runs_from(rank, begin)


@settings(deadline=None, max_examples=examples(300))
@given(turns(), st.integers(1, 5), st.integers(1, 7))
def test_a_table_holds_what_was_appended(done: list[Turn], world_size: int, block: int) -> None:
    table, owners, num_dealt = CacheTable.empty(world_size, block), [], 0
    for turn in done:
        before, after = table.numbers.copy(), grown(table, turn)
        assert np.array_equal(table.numbers, before), "a table is a value"
        table, owners = after, owners_after(owners, after, turn, world_size)
        check(table, owners)
        num_dealt += turn[0] == "dealt"
        full = [max(x.num_local) for x in (table.append(n) for n in range(block + 1))]
        assert max(table.num_reserved) in full, "what the current block needs is reserved"
        if "crop" not in {turn[0] for turn in done}:
            spread = max(table.num_local) - min(table.num_local)
            assert spread <= block + (world_size - 1) * num_dealt
        again = grown(table, ("crop", None, 0))
        assert again == table
        assert hash(again) == hash(table)
        assert table != table.append(1)


@settings(deadline=None, max_examples=examples(200))
@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 30), st.data())
def test_single_tokens_go_in_blocks_to_the_shortest(
    world_size: int, block: int, prompt: int, data: st.DataObject
) -> None:
    """In steps of any size, and taken back within a block, tokens go where they go one by one."""
    first = CacheTable.empty(world_size, block).append_sharded(ZigZag(), prompt)
    expected = list(first.num_local)
    for number in range(3):
        position = prompt + number * block
        at_least = [rank for rank in range(world_size) if expected[rank] == min(expected)]
        order = [(rank - position // block) % world_size for rank in at_least]
        expected[at_least[int(np.argmin(order))]] += block
    table, end = first, prompt + 3 * block
    while table.seq_len < end:
        step = min(data.draw(st.integers(1, 2 * block)), end - table.seq_len)
        after = table.append(step)
        dropped = data.draw(st.integers(0, step - 1))
        cropped = after.crop(after.seq_len - dropped)
        is_in_block = cropped.current == after.current
        table = cropped if is_in_block else after
    assert table == first.append(3 * block)
    assert list(table.num_local) == expected


def test_a_block_whose_begin_was_cropped_is_over() -> None:
    table = CacheTable.empty(2, 4).append(4).append(2)
    assert table.runs == (((0, 4),), ((4, 2),))
    assert table.crop(5).append(2).runs == (((0, 4),), ((4, 3),)), "the rest of a block goes on"
    assert table.crop(3).append(2).runs == (((0, 3),), ((3, 2),)), "else the shortest rank gets it"


def test_runs_that_touch_are_one() -> None:
    table = CacheTable.empty(2).append_sharded(ZigZag(), 8).append_sharded(ZigZag(), 8)
    assert table.runs == (((0, 2), (6, 4), (14, 2)), ((2, 4), (10, 4)))


def test_the_shape_of_numbers_changes_rarely() -> None:
    table, widths = CacheTable.empty(2, 1), []
    for _ in range(100):
        table = table.append(1)
        widths.append(table.numbers.shape[1])
    assert sorted({*widths}) == [8, 16, 32, 64]
    assert np.array_equal(table.crop(3).numbers, CacheTable.empty(2, 1).append(3).numbers)


REFUSALS = {
    "no rank": (lambda _: CacheTable.empty(0), ValueError, "world_size must be from 1"),
    "half a block": (
        lambda _: CacheTable.empty(2, 0.5),
        TypeError,
        "block must be an int, got 0.5",
    ),
    "no block": (lambda _: CacheTable.empty(2, 0), ValueError, "block must be from 1 to"),
    "fewer than none": (lambda t: t.append(-1), ValueError, "num_tokens must be from 0 to"),
    "more than int32": (lambda t: t.append(2**31), ValueError, "from 0 to 2,147,483,637, got"),
    "crop to less": (lambda t: t.crop(-1), ValueError, "seq_len must be from 0 to 10, got -1"),
    "crop to more": (lambda t: t.crop(11), ValueError, "seq_len must be from 0 to 10, got 11"),
    "runs with gaps": (
        lambda t: t.append_sharded(Striped(), 8),
        ValueError,
        "a cache holds runs of neighbouring positions, so 'striped' cannot shard its append steps",
    ),
    "a layout of another batch": (
        lambda t: t.append_sharded(Balanced(Mask.causal(), 8, 2), 6),
        ValueError,
        "8 tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=list(REFUSALS))
def test_refused(case: tuple[Any, type[Exception], str]) -> None:
    call, kind, message = case
    table = CacheTable.empty(2).append_sharded(ZigZag(), 10)
    with pytest.raises(kind, match=message):
        call(table)


@pytest.mark.parametrize("mark", [0, 5])
def test_its_run_table_is_the_one_of_its_numbers(mark: int) -> None:
    """Which is made without checks."""
    table = CacheTable.empty(2, 4).append(3).append_sharded(ZigZag(), 16).append(7)
    for one in (table.crop(0), table, table.crop(9), table.crop(9).append(2)):
        made, checked = one.run_table(mark), RunTable(one.marked(mark), argument="key_runs")
        assert made == checked
        for name in ("argument", "mark", "begin", "end", "missing", "num_bytes"):
            assert getattr(made, name) == getattr(checked, name)
