"""Caches that are saved, and loaded on other numbers of ranks, against whole tensors."""

from __future__ import annotations

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import ShardedCache
from dtensor_ring.decode.whole import KINDS
from tests.decode.caches import LAYERS, tokens
from tests.pool import Pool


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


def check_refused(folder: str) -> None:
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
    pool.run(2, check_refused, folder)
