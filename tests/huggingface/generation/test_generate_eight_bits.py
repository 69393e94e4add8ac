"""`generate` under a plan whose caches keep eight bits, beside a stock model that rounds alike."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dtensor_ring import RingError
from dtensor_ring.decode.plan import CacheTable
from dtensor_ring.planning.layout import ZigZag
from dtensor_ring.quantised import kept_tokens
from dtensor_ring.quantised.kept_tokens import KINDS
from parallel_plans.huggingface import ContextParallelCache, context_parallel_plan
from parallel_plans.huggingface.core.versions import with_cache
from tests.huggingface.generation.generating import (
    NUM_NEW,
    check_bits,
    check_generated,
    exact_softmax,
    generate,
    sharded,
    stock,
    tokens,
)
from tests.pool import on_ranks
from tests.quantised.test_kept_tokens import Rounded

SMALL = 4
"""Tokens of a block of which one scale is."""


class RoundedLayer(DynamicLayer):
    """What all ranks keep of a layer together; a window is kept by positions, not by ranks.

    A prompt is sharded by "zigzag", and needs no padding; later tokens are decoded.
    """

    def __init__(self, world_size: int, kv_dtype: str, has_window: bool) -> None:
        super().__init__()
        self._table, self._kv_dtype = CacheTable.empty(world_size), kv_dtype
        self._has_window = has_window
        self._kept: list[tuple[Rounded, ...]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        begin, num_new = self._table.seq_len, key_states.shape[2]
        new = key_states, value_states
        if not self._kept:
            num_parts = 1 if self._has_window else self._table.world_size
            self._kept = [self._nothing(new) for _ in range(num_parts)]
        before = [x.read() for x in self._kept[0]]
        whole = super().update(*new)
        append = self._table.append if begin else self._append_sharded
        self._table = append(num_new)
        for rank, pair in enumerate(self._kept):
            mine = self._positions(rank)
            for kept, x in zip(pair, whole, strict=True):
                kept.append(x[:, :, mine[mine >= begin]])
        if self._has_window and not begin:  # new tokens of a prompt see each other as they are
            return [torch.cat(x, 2) for x in zip(before, new, strict=True)]
        return [self._joined(number, x) for number, x in enumerate(whole)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        for pair in self._kept:
            for kept in pair:
                kept.rows(lambda x: x[beam_idx])

    def _append_sharded(self, num_tokens: int) -> CacheTable:
        return self._table.append_sharded(ZigZag(), num_tokens)

    def _positions(self, rank: int) -> Tensor:
        if self._has_window:
            return torch.arange(self._table.seq_len)
        return torch.from_numpy(self._table.positions(rank))

    def _joined(self, number: int, like: Tensor) -> Tensor:
        whole = torch.empty_like(like)
        for rank, pair in enumerate(self._kept):
            whole[:, :, self._positions(rank)] = pair[number].read()
        return whole

    def _nothing(self, like: tuple[Tensor, ...]) -> tuple[Rounded, ...]:
        return tuple(Rounded(x, self._kv_dtype, kind) for x, kind in zip(like, KINDS, strict=True))


def rounded_cache(model: Any, kv_dtype: str) -> DynamicCache:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    how = dist.get_world_size(), kv_dtype
    cache.layers = [RoundedLayer(*how, bool(layer.is_sliding)) for layer in cache.layers]
    return cache


@pytest.mark.parametrize(
    ("family", "kv_dtype", "options", "world_size"),
    [
        ("Llama", "int8", {"num_beams": 2}, 2),  # everything is seen
        ("Gemma 3", "fp8", {}, 3),
        ("DeepSeek-V3", "int8", {}, 2),
    ],
)
@on_ranks()
def test_generated_as_a_stock_model_that_rounds(
    family: str, kv_dtype: str, options: dict[str, Any]
) -> None:
    ours, theirs = sharded(family, cache_dtype=kv_dtype), stock(family)
    asked = {"input_ids": tokens(16)} | options
    with patch.object(kept_tokens, "BLOCK_SIZE", SMALL):
        found = generate(ours, **asked)
        given = with_cache(theirs, asked | {"cache": rounded_cache(theirs, kv_dtype)})
        with exact_softmax():
            expected = generate(theirs, **given)
    check_generated(found, expected, family, 1e-5)
    with exact_softmax():
        unrounded = generate(theirs, **asked)
    assert not torch.allclose(found.logits[-1], unrounded.logits[-1], rtol=0, atol=1e-5)


@on_ranks(1)
@torch.no_grad()
def test_turns_of_any_sizes() -> None:
    """They leave what one turn leaves: whole blocks from where the window begins."""
    ours = sharded("Gemma 3", "contiguous", cache_dtype="int8")
    ids, held = tokens(41), []
    with patch.object(kept_tokens, "BLOCK_SIZE", SMALL):
        for sizes in ([41], [1] * 41, [7, 1, 9, 24]):
            cache = ContextParallelCache(ours, decode_tokens=4)
            for part in ids.split(sizes, 1):
                ours(part, cache=cache)
            for window in cache.memory._windows.values():
                assert (41 - window.num_held) % SMALL == 0
                can_be_cropped = min(4, sizes[-1]) - 1
                assert window.num_held < window.size - 1 + can_be_cropped + SMALL
            first = cache.memory._windows[0]  # the layer that sees the embeddings
            held.append([x.read()[:, :, 1 - first.size :] for x in first._held])
    for other in held[1:]:
        torch.testing.assert_close(other, held[0], rtol=0, atol=1e-9)


@on_ranks(2)
def test_refused() -> None:
    model = stock("Llama")
    with pytest.raises(ValueError, match='kv_dtype of a cache must be one of "int8", "fp8"'):
        context_parallel_plan(model, cache_dtype="int4")
    ours = sharded("Llama", cache_dtype=("int8", "fp8")[dist.get_rank()])
    with pytest.raises(ValueError, match=r"cache_dtype of the plan: int8 on .0., fp8 on .1."):
        generate(ours, input_ids=tokens())
    with torch.no_grad(), pytest.raises(RingError, match=r"sequences selected or kv_dtype \("):
        ours(tokens(), use_cache=True)


@on_ranks(2)
@torch.no_grad()
def test_bytes() -> None:
    """About half, in layers that see everything and in windows; the same numbers on all ranks."""
    used = []
    for kv_dtype in (None, "int8"):
        ours = sharded("Gemma 3", cache_dtype=kv_dtype).bfloat16()
        cache = ContextParallelCache(ours)
        ours(tokens(1024), cache=cache)
        usage = cache.usage()
        check_bits(torch.tensor(usage))
        used.append(sum(usage.used))
    assert used[1] < 0.9 * used[0]


assert NUM_NEW > SMALL, "some block fills while tokens are decoded"
