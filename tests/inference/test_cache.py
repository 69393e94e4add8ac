"""Sharded caches of all ranks, against whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor_ring import ShardedCache, set_sequence_layout
from tests.pool import Pool
from tests.rings import fake_group
from tests.test_memory import Counted

BLOCK = 4
LAYERS = [(2, 8, 2, 8, torch.float32), (1, 16, 1, 4, torch.float64), (3, 8, 3, 5, torch.bfloat16)]
"""Heads and head dim of keys, and of values, and the dtype: as of a model with latents."""


@lru_cache  # making a mesh takes longer than all that is done with a cache
def caches(world_size: int, layout: str | None = None) -> list[ShardedCache]:
    """That of each rank; used again, they have to be reset."""
    made = []
    for rank in range(world_size):
        with fake_group(world_size, rank):
            mesh = init_device_mesh("cpu", (world_size,))
            made.append(ShardedCache(mesh, len(LAYERS), layout, BLOCK))
    return made


class World:
    """The caches of all ranks, and what they hold, whole."""

    def __init__(self, world_size: int, layout: str | None = None) -> None:
        self.caches = caches(world_size, layout)
        for cache in self.caches:
            cache.reset()
        self.batch, self.wholes = 2, empty(2)

    def dealt(self, num_tokens: int) -> None:
        self._append(num_tokens, dealt=True)

    def single(self, num_tokens: int) -> None:
        self._append(num_tokens, dealt=False)

    def _append(self, num_tokens: int, dealt: bool) -> None:
        new = [tokens(layer, self.batch, num_tokens) for layer in LAYERS]
        begin = self.caches[0].seq_len
        for rank, cache in enumerate(self.caches):
            cache.begin(num_tokens, dealt=dealt)
            given = torch.arange(num_tokens)
            if dealt:
                given = positions(cache.query_runs[rank]) - begin
            for layer, pair in zip(cache, new, strict=True):
                found = layer.append(*(x[:, :, given] for x in pair))
                assert all(map(torch.equal, found, own(layer)))
        self.wholes = [
            tuple(torch.cat(x, 2) for x in zip(*pairs, strict=True))
            for pairs in zip(self.wholes, new, strict=True)
        ]

    def crop(self, dropped: int) -> None:
        length = max(0, self.caches[0].seq_len - dropped)
        self._each(lambda cache: cache.crop(length), lambda x: x[:, :, :length])

    def select(self, rows: list[int]) -> None:
        which = torch.tensor([row % self.batch for row in rows])
        self._each(lambda cache: cache.select(which), lambda x: x[which])

    def reorder(self, first: int) -> None:
        which = torch.tensor([max(0, row - first) for row in range(self.batch)])
        self._each(lambda cache: cache.reorder(which), lambda x: x[which])

    def repeat(self, times: int) -> None:
        self._each(lambda cache: cache.repeat(times), lambda x: x.repeat_interleave(times, 0))

    def reset(self, batch: int) -> None:
        self._each(lambda cache: cache.reset(), lambda x: x)
        self.batch, self.wholes = batch, empty(batch)

    def _each(
        self, what: Callable[[ShardedCache], None], whole: Callable[[Tensor], Tensor]
    ) -> None:
        for cache in self.caches:
            what(cache)
        if self.caches[0].batch is None:
            self.wholes = empty(self.batch)  # before the first turn, or it was taken back
        else:
            self.wholes = [tuple(map(whole, pair)) for pair in self.wholes]
            self.batch = len(self.wholes[0][0])

    def check(self) -> None:
        first, (usage,) = self.caches[0], {cache.usage() for cache in self.caches}
        for rank, cache in enumerate(self.caches):
            assert torch.equal(cache.key_runs, first.key_runs)
            assert torch.equal(cache.positions, positions(cache.key_runs[rank]))
            if cache.batch is None:
                assert usage.held[rank] == usage.used[rank] == 0
                continue
            held = used = 0
            for layer, wholes in zip(cache, self.wholes, strict=True):
                for mine, whole in zip(own(layer), wholes, strict=True):
                    assert torch.equal(mine, whole[:, :, cache.positions])
                    held += mine.untyped_storage().nbytes()
                    used += mine.nbytes
            assert (held, used) == (usage.held[rank], usage.used[rank])


def positions(runs: Tensor) -> Tensor:
    """Of one rank."""
    parts = [torch.arange(start, start + length) for start, length in runs.tolist()]
    return torch.cat([torch.arange(0), *parts])


def empty(batch: int) -> list[tuple[Tensor, ...]]:
    return [tokens(layer, batch, 0) for layer in LAYERS]


def own(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


def tokens(layer: tuple[Any, ...], batch: int, num_tokens: int) -> tuple[Tensor, ...]:
    key_heads, key_dim, value_heads, value_dim, dtype = layer
    return (
        torch.randn(batch, key_heads, num_tokens, key_dim).to(dtype),
        torch.randn(batch, value_heads, num_tokens, value_dim).to(dtype),
    )


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


def test_caches_hold_what_was_appended(pool: Pool) -> None:
    pool.run(1, any_steps)


def any_steps() -> None:
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


def test_memory_grows_by_blocks(pool: Pool) -> None:
    """Views of the same memory until a block is full; the first turn takes what it needs."""
    pool.run(1, growth)


def growth() -> None:
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


def test_what_a_token_allocates(pool: Pool) -> None:
    """Nothing while there is room; then one layer after the other, whose old memory is freed."""
    pool.run(1, allocated)


def allocated() -> None:
    (cache,), new = World(1).caches, [tokens(layer, 2, 1) for layer in LAYERS]
    for turn in range(2 * BLOCK + 1):
        cache.begin(1, dealt=False)
        for layer, pair in zip(cache, new, strict=True):
            before = [StorageWeakRef(x.untyped_storage()) for x in own(layer)] if turn else []
            with Counted(0) as counted:
                layer.append(*pair)
            grows = turn % BLOCK == 0
            grown = layer.bytes_per_column * layer.capacities[0]
            assert counted.peak == (grown if grows else 0), turn
            assert all(x.expired() for x in before) == (grows or not turn)
            assert layer.capacities[0] == (turn // BLOCK + 1) * BLOCK


def _begun(dealt: bool = True) -> ShardedCache:
    """A cache of one rank with six tokens, and a turn of two more that no layer appended."""
    (cache,) = World(1).caches
    for num_tokens, appends in ((6, True), (2, False)):
        cache.begin(num_tokens, dealt=dealt)
        for layer, shape in zip(cache, LAYERS, strict=True):
            if appends:
                layer.append(*tokens(shape, 2, num_tokens))
    return cache


def _append(cache: ShardedCache, change: Callable[[Tensor], Any], num_tokens: int = 2) -> None:
    key, value = tokens(LAYERS[0], 2, num_tokens)
    cache[0].append(change(key), change(value))


def _again(cache: ShardedCache) -> None:
    _append(cache, lambda x: x)
    _append(cache, lambda x: x)


def _without_turn(cache: ShardedCache) -> None:
    cache.crop(6)
    _append(cache, lambda x: x)


REFUSALS: dict[str, tuple[Callable[[ShardedCache], Any], type[Exception], str]] = {
    "appended twice": (_again, ValueError, "layer 0 has appended this turn already; cache.begin"),
    "no turn": (_without_turn, ValueError, "layer 0 cannot append: no turn has begun, cache.begin"),
    "layers left out": (
        lambda cache: cache.begin(1, dealt=False),
        ValueError,
        r"cannot begin a turn: of 3 layers, 0, 1, 2 did not append the 2 tokens of this turn; if "
        r"it failed, crop\(6\) takes it back",
    ),
    "some layers left out": (
        lambda cache: (_append(cache, lambda x: x), cache.reorder(torch.tensor([1, 0]))),
        ValueError,
        "cannot select sequences: of 3 layers, 1, 2 did not append",
    ),
    "half a turn": (
        lambda cache: cache.crop(7),
        ValueError,
        "cannot crop to 7 tokens: of 3 layers",
    ),
    "more than there is": (lambda cache: cache.crop(9), ValueError, "from 0 to 8, got 9"),
    "less than nothing": (lambda cache: cache.crop(-1), ValueError, "from 0 to 8, got -1"),
    "another length": (
        lambda cache: _append(cache, lambda x: x[:, :, :1]),
        ValueError,
        r"key must be \(B, N, L, H\) with the 2 tokens of this turn, got \(2, 2, 1, 8\)",
    ),
    "another batch": (
        lambda cache: _append(cache, lambda x: x[:1]),
        ValueError,
        "key and value must be of 2 sequences, got 1 and 1",
    ),
    "other heads": (
        lambda cache: _append(cache, lambda x: x[:, :1]),
        ValueError,
        r"layer 0 holds keys of 2 heads of 8, torch.float32 on cpu, got 1 heads of 8",
    ),
    "another dtype": (
        lambda cache: _append(cache, lambda x: x.double()),
        ValueError,
        "torch.float32 on cpu, got 2 heads of 8, torch.float64 on cpu; cache.reset",
    ),
    "another device": (
        lambda cache: _append(cache, lambda x: x.to("meta")),
        ValueError,
        "torch.float32 on cpu, got 2 heads of 8, torch.float32 on meta",
    ),
    "gradients": (
        lambda cache: _append(cache, lambda x: x.requires_grad_()),
        ValueError,
        r"key needs a gradient, which a cache has none of: use torch.no_grad\(\)",
    ),
    "a DTensor": (
        lambda cache: _append(cache, lambda x: DTensor.from_local(x, cache.mesh, run_check=False)),
        TypeError,
        r"key must be a plain tensor, got DTensor; use .to_local\(\)",
    ),
    "a list": (lambda cache: _append(cache, lambda x: [x]), TypeError, "a plain tensor, got list"),
    "a layer too many": (lambda cache: cache[3], IndexError, "3 layers, there is no layer 3"),
    "no number of a layer": (lambda cache: cache["a"], TypeError, "number must be an int, got 'a'"),
    "no tokens": (
        lambda cache: (cache.crop(6), cache.begin(0, dealt=True)),
        ValueError,
        "num_tokens must be from 1",
    ),
    "runs of single tokens": (
        lambda cache: (cache.crop(6), cache.begin(1, dealt=False), cache.query_runs),
        ValueError,
        "only the tokens of a dealt turn have runs",
    ),
    "no such row": (
        lambda cache: (cache.crop(6), cache.select(torch.tensor([0, 2]))),
        ValueError,
        "rows must be from 0 to 1, got 2",
    ),
    "rows of floats": (
        lambda cache: (cache.crop(6), cache.select(torch.tensor([0.0]))),
        ValueError,
        "rows must be int32 or int64",
    ),
    "rows without content": (
        lambda cache: (cache.crop(6), cache.reorder(torch.tensor([0, 1], device="meta"))),
        ValueError,
        "rows must have content, got a tensor on meta; make it on the CPU",
    ),
    "rows in a list": (
        lambda cache: (cache.crop(6), cache.select([0])),
        TypeError,
        "rows must be a tensor of numbers, got list",
    ),
    "more rows than there are": (
        lambda cache: (cache.crop(6), cache.reorder(torch.tensor([0, 1, 1]))),
        ValueError,
        "rows must be a number for each of 2 sequences, got 3; select takes any",
    ),
    "no copies": (
        lambda cache: (cache.crop(6), cache.repeat(0)),
        ValueError,
        "times must be from 1",
    ),
    "no layers": (lambda cache: ShardedCache(cache.mesh, 0), ValueError, "num_layers must be from"),
    "no mesh": (lambda _: ShardedCache("cp", 1), TypeError, "mesh must be a DeviceMesh, got str"),
    "a layout of a batch": (
        lambda cache: ShardedCache(cache.mesh, 1, "balanced").begin(8, dealt=True),
        ValueError,
        "belongs to one batch",
    ),
}


def test_refused(pool: Pool) -> None:
    pool.run(1, refused)


def refused() -> None:
    """And nothing is changed: what was there, and the next turn, are right."""
    for name, (call, kind, message) in REFUSALS.items():
        cache = _begun()
        with pytest.raises(kind, match=message):
            call(cache)
        cache.crop(6)
        held = [[x.clone() for x in own(layer)] for layer in cache]
        cache.begin(3, dealt=False)
        for layer, shape, before in zip(cache, LAYERS, held, strict=True):
            new = tokens(shape, 2, 3)
            found = layer.append(*new)
            for x, y, z in zip(found, before, new, strict=True):
                assert torch.equal(x, torch.cat([y, z], 2)), name


def test_a_turn_that_failed_is_taken_back(pool: Pool) -> None:
    pool.run(1, taken_back)


def taken_back() -> None:
    cache = _begun()
    before = [x.clone() for x in own(cache[0])]
    _append(cache, lambda x: x)
    assert cache[0].keys.shape[2] == 8
    assert cache[1].keys.shape[2] == 6
    cache.crop(6)
    assert all(map(torch.equal, own(cache[0]), before))
    assert cache[1].keys.shape[2] == 6


def test_a_turn_that_failed_leaves_nothing(pool: Pool) -> None:
    pool.run(1, left_over)


def left_over() -> None:
    """No memory, no promise of it, and no number of sequences, if it was the first."""
    for layout, num_before, fits in (("zigzag", 6, 2), ("zigzag", 0, 3), ("contiguous", 1, 2)):
        world = World(3, layout)
        if num_before:
            world.dealt(num_before)
        before = [cache.usage() for cache in world.caches]
        for rank, cache in enumerate(world.caches):
            cache.begin(600, dealt=True)
            for layer, shape in list(zip(cache, LAYERS, strict=True))[
                : 1 + rank
            ]:  # the last rank has all
                layer.append(*tokens(shape, 2, 200))
            cache.crop(num_before)
        assert [cache.usage() for cache in world.caches] == before
        if not num_before:
            world.batch, world.wholes = fits, empty(fits)
        world.check()
        world.single(2)
        world.check()
        assert max(world.caches[0][0].capacities) <= num_before + BLOCK


def test_rows_of_all_layers_or_of_none(pool: Pool) -> None:
    pool.run(1, short_of_memory)


def short_of_memory() -> None:
    world = World(1)
    (cache,), calls, copied = world.caches, count(), Tensor.index_select

    def short(*args: Any) -> Tensor:
        if next(calls) == 2:  # the keys of the second layer
            raise MemoryError
        return copied(*args)

    world.dealt(6)
    rows = torch.tensor([1, 1, 0])
    with patch.object(Tensor, "index_select", short):
        cache.select(rows)
        cache.reorder(torch.tensor([2, 0, 1]))
        rows.zero_()  # nothing is read later
        assert cache[0].keys.shape[0] == 3
        with pytest.raises(MemoryError):
            own(cache[1])
    world.batch = 3
    world.wholes = [tuple(x[[0, 1, 1]] for x in pair) for pair in world.wholes]
    world.check()


def test_the_layout_is_the_axis_own(pool: Pool) -> None:
    pool.run(1, default_layout)


def default_layout() -> None:
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        assert ShardedCache(mesh, 1).layout.name == "zigzag"
        set_sequence_layout(mesh, "contiguous")
        assert ShardedCache(mesh, 1).layout.name == "contiguous"


def test_inference_mode_or_not(pool: Pool) -> None:
    """Memory that was made in inference mode is written to outside of it, and the other way."""
    pool.run(1, modes)


def modes() -> None:
    (cache,) = World(1).caches
    for turn, mode in enumerate([True, False, True, False]):
        with torch.inference_mode(mode):
            cache.begin(3, dealt=False)
            for layer, shape in zip(cache, LAYERS, strict=True):
                layer.append(*tokens(shape, 2, 3))
            if turn == 1:
                cache.reorder(torch.tensor([1, 0]))
    assert cache.seq_len == 12
