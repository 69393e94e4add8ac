"""Sharded caches of all ranks, against whole tensors."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor_ring import SequenceAxis, ShardedCache
from tests.decode.caches import BLOCK, LAYERS, World, own, tokens
from tests.pool import Pool, on_ranks
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


def test_memory_is_a_part_and_a_block(pool: Pool) -> None:
    pool.run(1, memory)


def memory() -> None:
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
