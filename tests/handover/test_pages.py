"""Blocks that move from pool to pool: what is kept, as it is kept, and the bytes that are sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import BlockPool, PagedBatch, PagedCache, RingError
from dtensor_ring.handover.call import group_beside
from dtensor_ring.handover.pages import moving_blocks
from dtensor_ring.handover.plan import MovedTokens
from dtensor_ring.paged.page_memory import QuantisedPages, _tensors
from tests.handover.test_hand_over import sent_bytes
from tests.pool import on_ranks

BLOCK, LAYERS, HEADS, DIMS = 16, 2, 2, (8, 4)
GROUPS = [([0], [1]), ([0, 1], [2]), ([0, 1, 2], [1, 2]), ([2], [0, 1])]
LENGTHS = (50, 16, 5)


def pool_on(ranks: list[int], kv_dtype: str | None) -> tuple[BlockPool, PagedCache | None]:
    pool, rank = BlockPool(20, BLOCK, len(ranks)), dist.get_rank()
    if rank not in ranks:
        return pool, None
    how = {"dtype": torch.bfloat16, "kv_dtype": kv_dtype, "value_head_dim": DIMS[1]}
    return pool, PagedCache(pool, HEADS, DIMS[0], LAYERS, ranks.index(rank), **how)


def write(cache: PagedCache | None, sequences: list[Any]) -> None:
    """The same numbers on all ranks."""
    for sequence in sequences:
        torch.manual_seed(sequence.number)
        for layer in range(LAYERS):
            pair = [torch.randn(1, HEADS, len(sequence), x).bfloat16() for x in DIMS]
            if cache is not None:
                PagedBatch(cache, [sequence], len(sequence)).write(layer, *pair)
        if cache is not None:
            cache.pool.commit(sequence)


def kept_bytes(lengths: tuple[int, ...], kv_dtype: str | None) -> int:
    """Of tokens in full units, with scales, and of the others."""
    total = 0
    for length in lengths:
        full = length // BLOCK if kv_dtype else 0
        total += 2 * HEADS * sum(DIMS) * (length - full * BLOCK)
        total += full * HEADS * (BLOCK * sum(DIMS) + 4 + 2 * 2 * DIMS[1])
    return LAYERS * total


def columns(cache: PagedCache | None, pairs: list[Any], side: int) -> dict[Any, Any]:
    """By layer, sequence and block: the tokens, and for full units the numbers as they are kept."""
    found: dict[Any, Any] = {}
    if cache is None:
        return found
    dealing, memory = cache.pool.dealing, cache._memory
    for layer in range(LAYERS):
        for number, pair in enumerate(pairs):
            sequence = pair[side]
            pieces = [x.split(BLOCK, 2) for x in cache.gather(layer, sequence)]
            mine = [n for n in range(sequence.num_blocks) if dealing.owner(n) == cache.rank]
            for at, block in enumerate(mine):
                kept = [x[at] for x in pieces]
                full = (block + 1) * BLOCK <= len(sequence)
                if isinstance(memory, QuantisedPages) and full:
                    unit = sequence.blocks[cache.rank][at] + layer * memory._num_units
                    kept += [x[unit] for q in memory._closed for x in _tensors(q)]
                    assert memory._slot[unit] < 0
                found[layer, number, block] = kept
    return found


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
@on_ranks(3)
def test_blocks_move(kv_dtype: str | None) -> None:
    group, rank = group_beside(init_device_mesh("cpu", (3,)).get_group()), dist.get_rank()
    for ranks in GROUPS:
        (one, given), (other, taken) = (pool_on(x, kv_dtype) for x in ranks)
        other.add([1] * 20)  # so that indices differ
        before = [other.add([x] * 5) for x in (2, 3)]
        write(taken, before)  # what was open in a block is of no use any more
        for sequence in before:
            other.free(sequence)
        pairs = [[pool.add([n] * n) for pool in (one, other)] for n in LENGTHS]
        write(given, [x for x, _ in pairs])
        moved = [MovedTokens(*pair, 0, len(pair[0])) for pair in pairs]
        with (
            sent_bytes() as sent,
            moving_blocks(
                group, torch.device("cpu"), moved, (one, other), ranks, (given, taken), {}
            ) as moving,
        ):
            if given is not None:
                for layer in range(LAYERS):
                    moving.send(layer)
            if rank == ranks[1][0]:
                moving.posts.tell([ranks[0][0]], torch.tensor([7]))
            heard = torch.zeros(1, dtype=torch.int64)
            if rank == ranks[0][0]:
                moving.posts.hear(ranks[1][0], heard)
        assert heard.item() == 7 * (rank == ranks[0][0])
        told: list[Any] = [None] * 3
        dist.all_gather_object(
            told, (sum(sent) - 8 * (rank == ranks[1][0]), columns(given, pairs, 0))
        )
        if not {*ranks[0]} & {*ranks[1]}:
            assert sum(x for x, _ in told) == kept_bytes(LENGTHS, kv_dtype)
        else:
            assert sum(x for x, _ in told) < kept_bytes(LENGTHS, kv_dtype)
        everything = {key: x for _, part in told for key, x in part.items()}
        for key, x in columns(taken, pairs, 1).items():
            assert all(map(torch.equal, x, everything[key])), key


@on_ranks(2)
def test_ranks_differ() -> None:
    """Ranks that move other blocks."""
    group = group_beside(init_device_mesh("cpu", (2,)).get_group())
    rank, ranks = dist.get_rank(), ([0], [1])
    (one, given), (other, taken) = (pool_on(x, None) for x in ranks)
    pair = [pool.add([3] * 40) for pool in (one, other)]
    write(given, pair[:1])
    moved = [MovedTokens(*pair, 0, 40 - 16 * rank)]

    def move() -> None:
        with moving_blocks(
            group, torch.device("cpu"), moved, (one, other), ranks, (given, taken), {}
        ) as moving:
            moving.send(0)
            moving.send(1)

    with pytest.raises(RingError, match="they differ in blocks that move"):
        move()
