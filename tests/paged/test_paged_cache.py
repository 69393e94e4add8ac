"""Keys and values in blocks: what is written, shared and copied, and attention through tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtensor_ring import BlockPool, Mask, decode_attention, merge_attention
from dtensor_ring.paged.api import PagedBatch, PagedCache
from tests.paged_attention import TOLERANCES, PagedCase, check_paged

CASES = {
    "one": PagedCase(),
    "unequal lengths": PagedCase(lengths=(1, 9, 30, 4)),
    "eight queries": PagedCase(lengths=(8, 9, 30), num_tokens=8),
    "more queries than a block": PagedCase(lengths=(30, 21), num_tokens=17, block=2),
    "window": PagedCase(lengths=(30, 9), num_tokens=3, mask=Mask.sliding(6)),
    "both ways": PagedCase(lengths=(30, 9), num_tokens=3, mask=Mask.full()),
    "a band": PagedCase(lengths=(30, 9), num_tokens=3, mask=Mask.local(5, 1)),
    "chunks": PagedCase(lengths=(30, 9), num_tokens=5, mask=Mask.chunked(7)),
    "a prefix": PagedCase(lengths=(30, 9), num_tokens=8, mask=Mask.prefix_causal(5)),
    "softcap": PagedCase(lengths=(30, 9), softcap=1.5),
    "head dims": PagedCase(lengths=(30, 9), num_tokens=2, head_dims=(8, 4)),
    "one head": PagedCase(lengths=(30, 9), heads=(6, 1), num_tokens=2),
    "no groups": PagedCase(lengths=(30, 9), heads=(2, 2), num_tokens=2),
    "float32": PagedCase(lengths=(30, 9), dtype=torch.float32, num_tokens=2),
    "bfloat16": PagedCase(lengths=(30, 9), dtype=torch.bfloat16, num_tokens=2),
}


@pytest.mark.pairs
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kernel", ["in_place", "gathered"])
@pytest.mark.parametrize("name", CASES)
def test_paged_attention(name: str, kernel: str, world_size: int) -> None:
    check_paged(replace(CASES[name], kernel=kernel, world_size=world_size))


MASKS = st.sampled_from([Mask.causal(), Mask.full(), Mask.chunked(7), Mask.prefix_causal(5)])
MASKS |= st.builds(Mask, st.none() | st.integers(0, 20), st.none() | st.integers(0, 5))


@st.composite
def paged_cases(draw: st.DrawFn) -> PagedCase:
    num_tokens = draw(st.integers(1, 8))
    lengths = st.lists(st.integers(num_tokens, 60), min_size=1, max_size=4)
    return PagedCase(
        lengths=tuple(draw(lengths)),
        num_tokens=num_tokens,
        mask=draw(MASKS),
        world_size=draw(st.integers(1, 4)),
        block=draw(st.sampled_from([1, 2, 4, 8, 16])),
        heads=draw(st.sampled_from([(4, 2), (3, 1), (2, 2)])),
        head_dims=draw(st.sampled_from([(8, 8), (8, 4)])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        dtype=draw(st.sampled_from(list(TOLERANCES))),
        kernel=draw(st.sampled_from([None, "gathered"])),
        seed=draw(st.integers(0, 9)),
    )


def test_random_paged_attention(request: pytest.FixtureRequest) -> None:
    wanted = request.config.getoption("--pool-steps") // 20

    @settings(max_examples=wanted, deadline=None, derandomize=True, database=None)
    @given(paged_cases())
    def check(case: PagedCase) -> None:
        check_paged(case)

    check()
    request.node.user_properties.append(("paged attentions tried", wanted))


def test_no_sequences() -> None:
    batch = PagedBatch(PagedCache(BlockPool(4), 2, 8, 1), [])
    batch.write(0, torch.empty(0, 2, 1, 8), torch.empty(0, 2, 1, 8))
    out, lse = batch.attend(0, torch.empty(0, 4, 1, 8))
    assert (out.shape, lse.shape) == ((0, 4, 1, 8), (0, 4, 1))


def test_a_batch_is_one_sequence_at_a_time() -> None:
    case = PagedCase(lengths=(30, 9, 17), num_tokens=3, dtype=torch.float32, world_size=2)
    caches, sequences = case.filled()
    for cache in caches:
        batched = case.attend(PagedBatch(cache, sequences, 3))
        for row, sequence in enumerate(sequences):
            query = case.query()[row : row + 1]
            alone = PagedBatch(cache, [sequence], 3).attend(0, query, scale=0.3)
            for one, many in zip(alone, batched, strict=True):
                assert torch.equal(one[0], many[row])


def tokens(cache: PagedCache, sequence: Any) -> list[float]:
    """What is written for a sequence on this rank."""
    keys, values = cache.gather(0, sequence)
    assert torch.equal(keys, values)
    return keys[0, 0, :, 0].tolist()


def of(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[None, None, :, None]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_copy_on_write_isolates(world_size: int) -> None:
    pool = BlockPool(8, block=4, world_size=world_size)
    caches = [PagedCache(pool, 1, 1, 2, rank) for rank in range(world_size)]
    first = pool.add(range(6))

    def write(sequence: Any, values: list[float]) -> None:
        for cache in caches:
            for layer in range(2):
                PagedBatch(cache, [sequence], len(values)).write(layer, of(values), of(values))
        pool.commit(sequence)

    def grow(sequence: Any, values: list[float]) -> None:
        copies = pool.append(sequence, [int(x) for x in values])
        for cache in caches:
            cache.copy(copies)
        write(sequence, values)

    def all_of(sequence: Any) -> list[float]:
        found = sorted(x for cache in caches for x in tokens(cache, sequence))
        for cache in caches:
            runs = pool.runs(sequence)[cache.rank].tolist()
            positions = [p for start, length in runs for p in range(start, start + length)]
            assert len(positions) == len(tokens(cache, sequence))
        return found

    write(first, [0, 1, 2, 3, 4, 5])
    twin = pool.fork(first)
    grow(twin, [60, 70, 80])
    grow(first, [6, 7, 8])
    assert all_of(first) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert all_of(twin) == [0, 1, 2, 3, 4, 5, 60, 70, 80]
    pool.crop(twin, 5)
    grow(twin, [50])
    assert all_of(twin) == [0, 1, 2, 3, 4, 50]
    # A third prompt finds the blocks of the first, and prefills what comes after them.
    third = pool.add([*range(8), 9])
    assert third.num_cached == 8
    write(third, [9])
    assert all_of(third) == [0, 1, 2, 3, 4, 5, 6, 7, 9]


def test_only_the_suffix_is_prefilled() -> None:
    """And a prompt whose beginning is shared gets the results of one that is written whole."""
    case = PagedCase(lengths=(29,), num_tokens=9, world_size=2)
    (query, key, value), rows = case.inputs()[0], slice(20, 29)
    pool = BlockPool(8, block=4, world_size=2)
    caches = [case.cache(pool, rank) for rank in range(2)]
    first = pool.add(range(20))
    for cache in caches:
        PagedBatch(cache, [first], 20).write(0, key[:, :, :20], value[:, :, :20])
    pool.commit(first)
    second = pool.add(range(29))
    assert second.num_cached == 20
    parts = []
    for cache in caches:
        batch = PagedBatch(cache, [second], len(second) - second.num_cached)
        batch.write(0, key[:, :, rows], value[:, :, rows])
        parts.append(batch.attend(0, query[:, :, rows], scale=0.3))
    for found, dense in zip(merge_attention(parts), case.expected(), strict=True):
        torch.testing.assert_close(found, dense.detach(), atol=1e-11, rtol=0)


def test_a_sharded_append_is_written_by_position() -> None:
    case = PagedCase(lengths=(21,), world_size=3)
    _, key, value = case.inputs()[0]
    pool = BlockPool(8, block=4, world_size=3)
    sequence = pool.add(range(21))
    for rank in range(3):
        whole, dealt = case.cache(pool, rank), case.cache(pool, rank)
        PagedBatch(whole, [sequence], 21).write(0, key, value)
        runs = pool.runs(sequence)[rank].tolist()
        positions = [p for start, length in runs for p in range(start, start + length)]
        mine = key[:, :, positions], value[:, :, positions]
        PagedBatch(dealt, [sequence], 21).write(0, *mine, dealt=True)
        assert torch.equal(dealt.layer(0)[0], whole.layer(0)[0])
        for found, written in zip(dealt.gather(0, sequence), mine, strict=True):
            assert torch.equal(found, written)
        # What the pool says about positions is what decode_attention takes.
        lone = pool.runs(sequence)[rank : rank + 1]
        query = case.inputs()[0][0][:, :, -1:]
        starts = torch.tensor([20])
        there = decode_attention(
            *(query, *dealt.gather(0, sequence)),
            key_runs=torch.from_numpy(lone),
            query_starts=starts,
        )
        here, _ = PagedBatch(dealt, [sequence]).attend(0, query)
        torch.testing.assert_close(here, there, atol=1e-11, rtol=0)
