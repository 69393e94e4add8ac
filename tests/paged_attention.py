"""Attention to sequences in a pool, next to dense attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtensor_ring import BlockPool, Mask, merge_attention
from dtensor_ring.paged.api import PagedBatch, PagedCache
from dtensor_ring.paged.blocks import PooledSequence
from dtensor_ring.planning.tile import CAUSAL
from tests.dense import dense_attention, visible


@dataclass(frozen=True)
class PagedCase:
    """Sequences of these lengths, in blocks that lie anywhere; all ranks are played in turn."""

    lengths: tuple[int, ...] = (9,)
    num_tokens: int = 1
    mask: Mask = CAUSAL
    world_size: int = 1
    block: int = 4
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (8, 8)
    softcap: float = 0.0
    dtype: torch.dtype = torch.float64
    kernel: str | None = None
    seed: int = 0

    def inputs(self) -> list[tuple[Tensor, ...]]:
        """By sequence: query, key and value `(1, N, L, H)`."""
        generator = torch.Generator().manual_seed(self.seed)
        (heads, kv_heads), (dim, value_dim) = self.heads, self.head_dims
        shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim)
        return [
            tuple(torch.randn(1, n, s, h, generator=generator).to(self.dtype) for n, h in shapes)
            for s in self.lengths
        ]

    def filled(self) -> tuple[list[PagedCache], list[PooledSequence]]:
        """The caches of all ranks, with the keys and values of all sequences."""
        per_rank = sum(n // (self.block * self.world_size) + 1 for n in self.lengths)
        pool = BlockPool(2 * per_rank, self.block, self.world_size)
        sequences = scattered(pool, self.lengths, self.seed)
        caches = [self.cache(pool, rank) for rank in range(self.world_size)]
        for cache in caches:
            for keys in cache.layer(0):
                keys.fill_(1e4)  # of sequences that are no more
        for sequence, (_, key, value) in zip(sequences, self.inputs(), strict=True):
            for cache in caches:
                PagedBatch(cache, [sequence], len(sequence)).write(0, key, value)
            pool.commit(sequence)
        return caches, sequences

    def cache(self, pool: BlockPool, rank: int) -> PagedCache:
        dims = self.heads[1], self.head_dims[0]
        return PagedCache(pool, *dims, 1, rank, self.head_dims[1], dtype=self.dtype)

    def query(self) -> Tensor:
        """The last tokens of all sequences."""
        return torch.cat([query[:, :, -self.num_tokens :] for query, _, _ in self.inputs()])

    def attend(self, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        return batch.attend(
            0, self.query(), mask=self.mask, scale=0.3, softcap=self.softcap, kernel=self.kernel
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        found = [self._dense(*tensors) for tensors in self.inputs()]
        return torch.cat([x.out for x in found]), torch.cat([x.lse for x in found])

    def _dense(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        rows = slice(-self.num_tokens, None)
        seen = visible(self.mask, (key.shape[2], key.shape[2]), 1)[:, 0, rows]
        how = {"scale": 0.3, "softcap": self.softcap, "seen": seen}
        return dense_attention(query[:, :, rows], key, value, self.mask, **how)


def scattered(pool: BlockPool, lengths: tuple[int, ...], seed: int) -> list[PooledSequence]:
    """Sequences that grew by turns, between others that were freed."""
    generator = torch.Generator().manual_seed(seed)
    sequences, others = [pool.add([]) for _ in lengths], []
    block = pool.dealing.block
    while any(len(x) < length for x, length in zip(sequences, lengths, strict=True)):
        for number in torch.randperm(len(lengths), generator=generator).tolist():
            sequence, missing = sequences[number], lengths[number] - len(sequences[number])
            pool.append(sequence, [number] * min(missing, block))
        usage = pool.usage()
        if min(usage.free) > pool.num_blocks // 2 + len(lengths):
            others.append(pool.add([0]))
    for other in others:
        pool.free(other)
    return sequences


TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def check_paged(case: PagedCase) -> None:
    """The partials of all ranks, merged, are dense attention."""
    caches, sequences = case.filled()
    parts = [case.attend(PagedBatch(cache, sequences, case.num_tokens)) for cache in caches]
    out, lse = merge_attention(parts)
    tolerance = TOLERANCES[case.dtype]
    for found, dense in zip((out, lse), case.expected(), strict=True):
        torch.testing.assert_close(found.double(), dense.detach(), atol=tolerance, rtol=tolerance)
