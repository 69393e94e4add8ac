"""The sharded caches of all ranks in one process, and what they hold, whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import ShardedCache
from dtensor_ring.quantised.kept_tokens import KINDS
from tests.quantised.test_kept_tokens import Rounded
from tests.rings import fake_group

BLOCK = 4
LAYERS = [(2, 8, 2, 8, torch.float32), (1, 16, 1, 4, torch.float64), (3, 8, 3, 5, torch.bfloat16)]
"""Heads and head dim of keys, and of values, and the dtype: as of a model with latents."""


@lru_cache  # making a mesh takes longer than all that is done with a cache
def caches(
    world_size: int, layout: str | None = None, kv_dtype: str | None = None
) -> list[ShardedCache]:
    """That of each rank; used again, they have to be reset."""
    made = []
    for rank in range(world_size):
        with fake_group(world_size, rank):
            mesh = init_device_mesh("cpu", (world_size,))
            made.append(ShardedCache(mesh, len(LAYERS), layout, BLOCK, kv_dtype))
    return made


class World:
    """The caches of all ranks, and what they hold, whole."""

    def __init__(
        self, world_size: int, layout: str | None = None, kv_dtype: str | None = None
    ) -> None:
        self.caches = caches(world_size, layout, kv_dtype)
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
            self.wholes = empty(self.batch)  # before the first append step, or it was taken back
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
            for number, layer in enumerate(cache):
                assert all(map(torch.equal, own(layer), self.columns(rank, number)))
            assert self.num_bytes(cache) == (usage.held[rank], usage.used[rank])

    def columns(self, rank: int, number: int) -> list[Tensor]:
        """What a layer of a rank has to hold."""
        return [x[:, :, self.caches[rank].positions] for x in self.wholes[number]]

    def num_bytes(self, cache: ShardedCache) -> tuple[int, int]:
        """What is allocated, and what is used of it."""
        found = [x for layer in cache for x in own(layer)]
        return sum(x.untyped_storage().nbytes() for x in found), sum(x.nbytes for x in found)


class RoundedWorld(World):
    """In eight bits, and what is kept of each rank's columns."""

    def __init__(self, world_size: int, layout: str | None, kv_dtype: str) -> None:
        self.kv_dtype, self.kept = kv_dtype, list[list[tuple[Rounded, ...]]]()
        super().__init__(world_size, layout, kv_dtype)
        self._start()

    def _start(self) -> None:
        self.kept = [
            [
                tuple(
                    [Rounded(x, self.kv_dtype, kind) for x, kind in zip(pair, KINDS, strict=True)]
                )
                for pair in empty(self.batch)
            ]
            for _ in self.caches
        ]

    def _append(self, num_tokens: int, dealt: bool) -> None:
        begin = self.caches[0].seq_len
        super()._append(num_tokens, dealt)
        for cache, layers in zip(self.caches, self.kept, strict=True):
            new = cache.positions[cache.positions >= begin]
            for pair, wholes in zip(layers, self.wholes, strict=True):
                for kept, whole in zip(pair, wholes, strict=True):
                    kept.append(whole[:, :, new])

    def crop(self, dropped: int) -> None:
        super().crop(dropped)
        if self.caches[0].batch is None:
            self._start()
        for rank, layers in enumerate(self.kept):
            for pair in layers:
                for kept in pair:
                    kept.crop(self.caches[0].table.num_local[rank])

    def reset(self, batch: int) -> None:
        super().reset(batch)
        self._start()

    def select(self, rows: list[int]) -> None:
        which = torch.tensor([row % self.batch for row in rows])
        super().select(rows)
        if self.caches[0].batch is None:  # no rows yet
            return
        for layers in self.kept:
            for pair in layers:
                for kept in pair:
                    kept.rows(lambda x: x[which])

    def reorder(self, first: int) -> None:
        self.select([max(0, row - first) for row in range(self.batch)])

    def repeat(self, times: int) -> None:
        self.select([row for row in range(self.batch) for _ in range(times)])

    def columns(self, rank: int, number: int) -> list[Tensor]:
        return [kept.read() for kept in self.kept[rank][number]]

    def num_bytes(self, cache: ShardedCache) -> tuple[int, int]:
        found = sum(memory.tokens.num_bytes for layer in cache for memory in layer._memory)
        return found, found


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
