"""Sharded caches of all ranks and their tables, against whole tensors and a list of owners."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor_ring import (
    Balanced,
    BlockCyclic,
    Contiguous,
    Mask,
    SequenceAxis,
    ShardedCache,
    Striped,
    ZigZag,
    decode_attention,
    merge_attention,
)
from dtensor_ring.decode.plan import CacheTable
from dtensor_ring.planning.run_table import MARKED, RunTable
from dtensor_ring.quantised import kept_tokens
from dtensor_ring.quantised.block_scales import FORMATS
from tests.decode.caches import BLOCK, LAYERS, RoundedWorld, World, caches, own, positions, tokens
from tests.dense import dense_attention
from tests.drawn import examples
from tests.pool import on_ranks
from tests.refusals import Refused, check_refused
from tests.rings import fake_group
from tests.test_memory import Counted

STEPS = st.lists(
    st.tuples(st.just("dealt"), st.integers(1, 30))
    | st.tuples(st.just("single"), st.integers(1, 9))
    | st.tuples(st.just("crop"), st.integers(0, 20))
    | st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=3))
    | st.tuples(st.just("reorder"), st.integers(0, 2))
    | st.tuples(st.just("repeat"), st.integers(1, 2))
    | st.tuples(st.just("reset"), st.integers(1, 2)),
    max_size=10,
)


@on_ranks(1)
def test_caches_hold_what_was_appended() -> None:
    @example([("dealt", 1), ("dealt", 1), ("repeat", 2), ("crop", 1)], 1, "zigzag")
    @settings(deadline=None, max_examples=40, database=None)
    @given(STEPS, st.integers(1, 4), st.sampled_from(["zigzag", "contiguous", "block_cyclic:2"]))
    def check(steps: list[tuple[str, Any]], world_size: int, layout: str) -> None:
        world = World(world_size, layout)
        for what, number in steps:
            getattr(world, what)(number)
            world.check()

    check()


@on_ranks(1)
def test_memory_is_a_part_and_a_block() -> None:
    world, per_token = World(3, "zigzag"), 2 * (32 * 4 + 20 * 8 + 39 * 2)
    for turn in range(40):
        world.dealt(18) if turn in (0, 20) else world.single(2)
        world.check()
        for held in world.caches[0].usage().held:
            assert held <= per_token * (world.caches[0].seq_len / 3 + BLOCK)


@on_ranks(1)
def test_memory_grows_by_blocks() -> None:
    """Views of the same memory until a block is full; the first append step takes what it needs."""
    (cache,), addresses = World(1).caches, []
    for turn in range(30):
        cache.begin(6 if turn == 0 else 1, dealt=turn == 0)
        for layer, shape in zip(cache, LAYERS, strict=True):
            keys, _ = layer.append(*tokens(shape, 2, 6 if turn == 0 else 1))
        addresses.append(keys.data_ptr())
        capacity = 6 + -(-turn // BLOCK) * BLOCK
        assert keys.untyped_storage().nbytes() == 2 * 24 * 2 * capacity
    assert len(set(addresses)) > 5
    assert all(len(set(addresses[i : i + BLOCK])) == 1 for i in range(1, 29, BLOCK))


@on_ranks(1)
def test_what_a_token_allocates() -> None:
    """Nothing while there is room; then one layer after the other, whose old memory is freed."""
    (cache,), new = World(1).caches, [tokens(layer, 2, 1) for layer in LAYERS]
    for turn in range(2 * BLOCK + 1):
        cache.begin(1, dealt=False)
        for layer, pair in zip(cache, new, strict=True):
            before = [StorageWeakRef(x.untyped_storage()) for x in own(layer)] if turn else []
            with Counted(0) as counted:
                layer.append(*pair)
            grows = turn % BLOCK == 0
            grown = layer.num_bytes(layer.capacities[0])
            assert counted.peak == (grown if grows else 0), turn
            assert all(x.expired() for x in before) == (grows or not turn)
            assert layer.capacities[0] == (turn // BLOCK + 1) * BLOCK


@on_ranks(1)
def test_the_layout_is_the_axis_own() -> None:
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        assert ShardedCache(mesh, 1).layout.name == "zigzag"
        SequenceAxis(mesh, "contiguous")
        assert ShardedCache(mesh, 1).layout.name == "contiguous"


@on_ranks(1)
def test_inference_mode_or_not() -> None:
    """Memory that was made in inference mode is written to outside of it, and the other way."""
    (cache,) = World(1).caches
    for turn, mode in enumerate([True, False, True, False]):
        with torch.inference_mode(mode):
            cache.begin(3, dealt=False)
            for layer, shape in zip(cache, LAYERS, strict=True):
                layer.append(*tokens(shape, 2, 3))
            if turn == 1:
                cache.reorder(torch.tensor([1, 0]))
    assert cache.seq_len == 12


# Sharded caches in eight bits: what is kept, its bytes, and attention to it on several ranks.

SMALL = 4
"""Tokens of a block of which one scale is, so that few tokens fill many."""


@on_ranks(1)
def test_what_is_kept() -> None:
    """Against each rank's columns one by one, whatever comes between them."""

    @example([("dealt", 30), ("crop", 9), ("single", 9), ("crop", 2)], 2, ("zigzag", "int8"))
    @example([("dealt", 30), ("dealt", 12), ("crop", 12), ("single", 1)], 2, ("contiguous", "fp8"))
    @settings(deadline=None, max_examples=30, database=None)
    @given(STEPS, st.integers(1, 4), st.sampled_from([("zigzag", "int8"), ("contiguous", "fp8")]))
    def check(steps: list[tuple[str, Any]], world_size: int, how: tuple[str, str]) -> None:
        world = RoundedWorld(world_size, *how)
        for what, number in steps:
            getattr(world, what)(number)
            world.check()

    with patch.object(kept_tokens, "BLOCK_SIZE", SMALL):
        check()


@pytest.mark.parametrize("kv_dtype", FORMATS)
@on_ranks(1)
def test_attention_to_what_is_kept(kv_dtype: str) -> None:
    """A prompt and decoded tokens on 1 to 4 ranks, against dense attention in float64."""
    key_heads, dim, _, value_dim, _ = shape = *LAYERS[0][:4], torch.float64
    for world_size in range(1, 5):
        held = caches(world_size, "zigzag", kv_dtype)
        given = tokens(shape, 2, 300)
        _fill(held, given, world_size)
        query = torch.randn(2, 2 * key_heads, 3, dim, dtype=torch.float64)
        parts, wholes = (
            [],
            [torch.empty(2, key_heads, 300, x, dtype=torch.float64) for x in (dim, value_dim)],
        )
        for rank, cache in enumerate(held):
            runs = cache.key_runs[rank : rank + 1]
            how: dict[str, Any] = {"key_runs": runs, "query_starts": torch.tensor([297])}
            parts.append(decode_attention(query, *own(cache[0]), return_lse=True, **how))
            for whole, mine in zip(wholes, own(cache[0]), strict=True):
                whole[:, :, cache.positions] = mine
        seen = torch.ones(3, 300, dtype=torch.bool).tril(297)
        out, lse = merge_attention(parts)
        expected = dense_attention(query, *wholes, Mask.causal(), seen=seen.expand(2, 3, 300))
        torch.testing.assert_close(out, expected.out.detach(), atol=1e-12, rtol=0)
        torch.testing.assert_close(lse, expected.lse.detach(), atol=1e-12, rtol=0)
        for whole, exact in zip(wholes, given, strict=True):
            assert not torch.equal(whole, exact)
            torch.testing.assert_close(whole, exact, atol=0.5, rtol=0)


def _fill(held: list[ShardedCache], given: tuple[Tensor, ...], world_size: int) -> None:
    """The first layer, with a sharded append step, and tokens one by one."""
    num_single = 300 - 280 // (2 * world_size) * 2 * world_size
    for rank, cache in enumerate(held):
        cache.reset()
        cache.begin(300 - num_single, dealt=True)
        mine = positions(cache.query_runs[rank])
        cache[0].append(*(x[:, :, mine] for x in given))
        _others(cache, len(mine))
        for now in range(300 - num_single, 300):
            cache.begin(1, dealt=False)
            cache[0].append(*(x[:, :, now : now + 1] for x in given))
            _others(cache, 1)


def _others(cache: ShardedCache, num_tokens: int) -> None:
    for layer, shape in list(zip(cache, LAYERS, strict=True))[1:]:
        layer.append(*(x[:, :, :num_tokens] for x in tokens(shape, 2, num_tokens)))


@on_ranks(1)
def test_half_the_bytes() -> None:
    found = []
    for kv_dtype in (None, *FORMATS):
        (cache,) = caches(1, None, kv_dtype)
        cache.reset()
        cache.begin(10_000, dealt=True)
        for layer in cache:
            layer.append(*(torch.zeros(1, 1, 10_000, 64, dtype=torch.bfloat16) for _ in "kv"))
        found.append(cache.usage().held[0])
        cache.reset()
    assert all(x <= 0.53 * found[0] for x in found[1:])


@on_ranks(1)
def test_ranks_compare_formats() -> None:
    """The mark that attention compares differs by format, before and after rows were selected."""
    marks = set()
    for kv_dtype in (None, *FORMATS):
        (cache,) = caches(1, None, kv_dtype)
        cache.reset()
        cache.begin(2, dealt=True)
        for layer, shape in zip(cache, LAYERS, strict=True):
            layer.append(*tokens(shape, 2, 2))
        marks.add(cache.key_runs[0, -1, 0].item())
        cache.reorder(torch.tensor([1, 0]))
        marks.add(cache.key_runs[0, -1, 0].item())
    assert len(marks) == 6


@on_ranks(1)
def test_failures_leave_layers_as_they_were() -> None:
    """An append of which the values fail is done again, and gives what it would have given."""
    (cache,), found = caches(1, "zigzag", "int8"), []
    new = [tokens(shape, 2, 70) for shape in LAYERS]
    for fails in (True, False):
        cache.reset()
        for _ in range(2):
            cache.begin(70, dealt=False)
            broken = kept_tokens.KINDS | {"values": _fail}
            with patch.object(kept_tokens, "KINDS", broken if fails else kept_tokens.KINDS):
                if fails:
                    with pytest.raises(MemoryError):
                        cache[0].append(*new[0])
            for layer, pair in zip(cache, new, strict=True):
                layer.append(*pair)
        found.append([cache.usage(), *[x for layer in cache for x in own(layer)]])
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1:], found[1][1:]))


def _fail(*_: Any) -> None:
    raise MemoryError


# Tables of growing sequences, against a list of owners.

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


REFUSALS: Refused = {
    ValueError: {
        "world_size must be from 1": lambda _: CacheTable.empty(0),
        "block must be from 1 to": lambda _: CacheTable.empty(2, 0),
        "num_tokens must be from 0 to": lambda t: t.append(-1),
        "from 0 to 2,147,483,637, got": lambda t: t.append(2**31),
        "seq_len must be from 0 to 10, got -1": lambda t: t.crop(-1),
        "seq_len must be from 0 to 10, got 11": lambda t: t.crop(11),
        "runs of neighbouring positions, so 'striped' cannot shard its append steps": lambda t: (
            t.append_sharded(Striped(), 8)
        ),
        "8 tokens": lambda t: t.append_sharded(Balanced(Mask.causal(), 8, 2), 6),
    },
    TypeError: {"block must be an int, got 0.5": lambda _: CacheTable.empty(2, 0.5)},
}


def test_refused() -> None:
    table = CacheTable.empty(2).append_sharded(ZigZag(), 10)
    check_refused(REFUSALS, lambda call: call(table))


@pytest.mark.parametrize("mark", [0, 5])
def test_its_run_table_is_the_one_of_its_numbers(mark: int) -> None:
    """Which is made without checks."""
    table = CacheTable.empty(2, 4).append(3).append_sharded(ZigZag(), 16).append(7)
    for one in (table.crop(0), table, table.crop(9), table.crop(9).append(2)):
        made, checked = one.run_table(mark), RunTable(one.marked(mark), argument="key_runs")
        assert made == checked
        for name in ("argument", "mark", "begin", "end", "missing", "num_bytes"):
            assert getattr(made, name) == getattr(checked, name)
