"""Sharded caches in eight bits: what is kept, its bytes, and attention to it on several ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtensor_ring import Mask, ShardedCache, decode_attention, merge_attention
from dtensor_ring.quantised import kept_tokens
from dtensor_ring.quantised.block_scales import FORMATS
from tests.decode.caches import LAYERS, RoundedWorld, caches, own, positions, tokens
from tests.decode.test_cache import STEPS
from tests.dense import dense_attention
from tests.pool import on_ranks

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
