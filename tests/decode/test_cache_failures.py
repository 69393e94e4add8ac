"""What sharded caches refuse, and append steps that failed half way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_ring import ShardedCache
from tests.decode.caches import BLOCK, LAYERS, World, empty, own, tokens
from tests.pool import on_ranks
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
