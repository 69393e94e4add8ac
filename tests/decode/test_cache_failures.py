"""What sharded caches refuse, append steps that fail half way, and caches that are saved."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_ring import ShardedCache
from dtensor_ring.decode.whole import KINDS
from tests.decode.caches import BLOCK, LAYERS, World, empty, own, tokens
from tests.pool import Pool, on_ranks
from tests.refusals import Refused, check_refused


def fresh_mesh() -> DeviceMesh:
    """That of a cache may be of an earlier world, as caches are kept between tests."""
    return init_device_mesh("cpu", (1,))


def _begun(dealt: bool = True) -> ShardedCache:
    """A cache of one rank with six tokens, and two more that no layer appended."""
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


REFUSALS: Refused = {
    ValueError: {
        "layer 0 has made this append step already; cache.begin": _again,
        "layer 0 cannot append: no append step has begun, cache.begin": _without_turn,
        "of 3 layers, 0, 1, 2 did not append the 2 tokens .* if it failed, crop.6. takes it back": (
            lambda cache: cache.begin(1, dealt=False)
        ),
        "cannot select sequences: of 3 layers, 1, 2 did not append": lambda cache: (
            _append(cache, lambda x: x),
            cache.reorder(torch.tensor([1, 0])),
        ),
        "cannot crop to 7 tokens: of 3 layers": lambda cache: cache.crop(7),
        "from 0 to 8, got 9": lambda cache: cache.crop(9),
        "from 0 to 8, got -1": lambda cache: cache.crop(-1),
        r"key must be \(B, N, L, H\) with the 2 tokens .*, got \(2, 2, 1, 8\)": lambda cache: (
            _append(cache, lambda x: x[:, :, :1])
        ),
        "key and value must be of 2 sequences, got 1 and 1": lambda cache: _append(
            cache, lambda x: x[:1]
        ),
        "layer 0 holds keys of 2 heads of 8, torch.float32 on cpu, got 1 heads": lambda cache: (
            _append(cache, lambda x: x[:, :1])
        ),
        "torch.float32 on cpu, got 2 heads of 8, torch.float64 on cpu; cache.reset": lambda cache: (
            _append(cache, lambda x: x.double())
        ),
        "torch.float32 on cpu, got 2 heads of 8, torch.float32 on meta": lambda cache: _append(
            cache, lambda x: x.to("meta")
        ),
        r"key needs a gradient, which a cache has none of: use torch.no_grad\(\)": lambda cache: (
            _append(cache, lambda x: x.requires_grad_())
        ),
        "num_tokens must be from 1": lambda cache: (cache.crop(6), cache.begin(0, dealt=True)),
        "only the tokens of a sharded append step have runs": lambda cache: (
            cache.crop(6),
            cache.begin(1, dealt=False),
            cache.query_runs,
        ),
        "rows must be from 0 to 1, got 2": lambda cache: (
            cache.crop(6),
            cache.select(torch.tensor([0, 2])),
        ),
        "rows must be int32 or int64": lambda cache: (
            cache.crop(6),
            cache.select(torch.tensor([0.0])),
        ),
        "rows must have content, got a tensor on meta; make it on the CPU": lambda cache: (
            cache.crop(6),
            cache.reorder(torch.tensor([0, 1], device="meta")),
        ),
        "rows must be a number for each of 2 sequences, got 3; select takes any": lambda cache: (
            cache.crop(6),
            cache.reorder(torch.tensor([0, 1, 1])),
        ),
        "times must be from 1": lambda cache: (cache.crop(6), cache.repeat(0)),
        "num_layers must be from": lambda _: ShardedCache(fresh_mesh(), 0),
        "belongs to one batch": lambda _: ShardedCache(fresh_mesh(), 1, "balanced").begin(
            8, dealt=True
        ),
    },
    TypeError: {
        r"key must be a plain tensor, got DTensor; use .to_local\(\)": lambda cache: _append(
            cache, lambda x: DTensor.from_local(x, cache.mesh, run_check=False)
        ),
        "a plain tensor, got list": lambda cache: _append(cache, lambda x: [x]),
        "number must be an int, got 'a'": lambda cache: cache["a"],
        "rows must be a tensor of numbers, got list": lambda cache: (
            cache.crop(6),
            cache.select([0]),
        ),
        "mesh must be a DeviceMesh, got str": lambda _: ShardedCache("cp", 1),
    },
    IndexError: {"3 layers, there is no layer 3": lambda cache: cache[3]},
}


@on_ranks(1)
def test_refused() -> None:
    """And nothing is changed: what was there, and the next append step, are right."""

    def run(call: Callable[[ShardedCache], Any]) -> None:
        cache = _begun()
        try:
            call(cache)
        finally:
            cache.crop(6)
            held = [[x.clone() for x in own(layer)] for layer in cache]
            cache.begin(3, dealt=False)
            for layer, shape, before in zip(cache, LAYERS, held, strict=True):
                new = tokens(shape, 2, 3)
                for x, y, z in zip(layer.append(*new), before, new, strict=True):
                    assert torch.equal(x, torch.cat([y, z], 2))

    check_refused(REFUSALS, run)


@on_ranks(1)
def test_an_append_that_failed_is_taken_back() -> None:
    cache = _begun()
    before = [x.clone() for x in own(cache[0])]
    _append(cache, lambda x: x)
    assert cache[0].keys.shape[2] == 8
    assert cache[1].keys.shape[2] == 6
    cache.crop(6)
    assert all(map(torch.equal, own(cache[0]), before))
    assert cache[1].keys.shape[2] == 6


@on_ranks(1)
def test_an_append_that_failed_leaves_nothing() -> None:
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


@on_ranks(1)
def test_rows_of_all_layers_or_of_none() -> None:
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


# Caches that are saved, and loaded on other numbers of ranks, against whole tensors.


def made(layout: str | None = None, kv_dtype: str | None = None) -> ShardedCache:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return ShardedCache(mesh, len(LAYERS), layout, 4, kv_dtype)


def append(cache: ShardedCache, num_tokens: int, dealt: bool, seed: int) -> list[list[Tensor]]:
    """What each layer appends, whole."""
    torch.manual_seed(seed)
    new = [tokens(layer, 2, num_tokens) for layer in LAYERS]
    begin = cache.seq_len
    cache.begin(num_tokens, dealt=dealt)
    own = cache.positions[cache.positions >= begin] - begin
    given = own if dealt else torch.arange(num_tokens)
    for layer, pair in zip(cache, new, strict=True):
        layer.append(*(x[:, :, given] for x in pair))
    return [[*pair] for pair in new]


def joined(*steps: list[list[Tensor]]) -> list[list[Tensor]]:
    """Keys and values of each layer after some append steps."""
    by_layer = zip(*steps, strict=True)
    return [[torch.cat(x, 2) for x in zip(*pairs, strict=True)] for pairs in by_layer]


def check_whole(cache: ShardedCache, wholes: list[list[Tensor]]) -> None:
    for number, pair in enumerate(wholes):
        assert all(map(torch.equal, cache.whole(number), pair))


def save(folder: str) -> None:
    cache = made("zigzag")
    assert cache.state_dict() == {"seq_len": 0}
    steps = [append(cache, n, dealt, n) for n, dealt in ((17, True), (12, False), (30, True))]
    wholes = joined(*steps)
    check_whole(cache, wholes)
    rows = torch.tensor([1, 0, 1])
    cache.select(rows)
    cache.crop(40)
    wholes = [[x[rows, :, :40] for x in pair] for pair in wholes]
    check_whole(cache, wholes)
    state = cache.state_dict()
    if dist.get_rank() == 0:
        torch.save((state, wholes), Path(folder, "saved.pt"))
    with pytest.raises(TypeError, match=r"ShardedCache cannot be pickled.*state_dict"):
        pickle.dumps(cache)
    assert deepcopy(cache).seq_len == 40
    cache.begin(1, dealt=False)
    with pytest.raises(ValueError, match="cannot read the whole cache: of 3 layers"):
        cache.state_dict()


def load(folder: str, layout: str | None) -> None:
    state, wholes = torch.load(Path(folder, "saved.pt"))
    cache = made(layout)
    append(cache, 5, dealt=False, seed=5)
    cache.load_state_dict(state)
    assert (cache.seq_len, cache.batch) == (40, 3)
    assert max(cache.table.num_local) - min(cache.table.num_local) <= 2, "each rank has a part"
    check_whole(cache, wholes)
    cache.select(torch.tensor([0, 1]))
    new = append(cache, 6, dealt=False, seed=6)
    wholes = joined([[x[:2] for x in pair] for pair in wholes], new)
    check_whole(cache, wholes)
    few = {x: y[:, :, :5] if isinstance(y, Tensor) else 5 for x, y in state.items()}
    cache.load_state_dict(few)  # fewer tokens than the layout deals
    assert cache.seq_len == 5
    check_whole(cache, [[few[f"layers.{i}.{kind}"] for kind in KINDS] for i in range(len(LAYERS))])


def check_refused_files(folder: str) -> None:
    state, wholes = torch.load(Path(folder, "saved.pt"))
    cache, one = made(), "layers.1.keys"
    cache.load_state_dict(state)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("of a cache of 3 layers, got nothing", {}),
        ("of a cache of 3 layers, got seq_len, layers", {x: state[x] for x in state if x != one}),
        ("of a cache of 3 layers", state | {"layers.3.keys": state[one]}),
        ("of a cache of 3 layers", state | {"seq_len": "40"}),
        (r"40 tokens in each tensor, got \[39, 40\]", state | {one: state[one][:, :, 1:]}),
        (
            "the ranks of a ring must load the same state.*differ in layers.1.keys",
            state | {one: state[one] * (1 + dist.get_rank())},
        ),
    ]
    for match, other in wrong:
        with pytest.raises(ValueError, match=match):
            cache.load_state_dict(other)
        check_whole(cache, wholes)
    rounded = made(kv_dtype="int8")
    floats = {x: y.double() if isinstance(y, Tensor) else y for x, y in state.items()}
    rounded.load_state_dict(floats)
    for number, pair in enumerate(wholes):
        for here, there in zip(rounded.whole(number), pair, strict=True):
            torch.testing.assert_close(here, there.double(), rtol=0, atol=0.05)


def test_caches_are_loaded_on_other_ranks(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    pool.run(3, save, folder)
    pool.run(2, load, folder, "contiguous")
    pool.run(1, load, folder, "zigzag")
    pool.run(4, load, folder, "block_cyclic:4")
    pool.run(2, check_refused_files, folder)
