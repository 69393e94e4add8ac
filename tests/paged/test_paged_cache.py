"""Paged caches attend as a dense attention does, on any ranks; and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import (
    BlockPool,
    Mask,
    RingError,
    decode_attention,
    merge_attention,
    ring_attention,
)
from dtensor_ring.paged.api import PagedBatch, PagedCache
from dtensor_ring.paged.run import PagedStep
from tests.paged_attention import TOLERANCES, PagedCase, check_paged
from tests.pool import Pool
from tests.refusals import Refused, check_refused

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


QUERY = torch.zeros(1, 2, 1, 8)


def stale(cache: PagedCache, s: Any) -> None:
    batch = PagedBatch(cache, [s])
    cache.pool.append(s, [1])
    batch.attend(0, QUERY)


def committed(cache: PagedCache, s: Any) -> None:
    cache.pool.commit(s, 4)
    PagedBatch(cache, [s], 3).write(0, torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))


def committed_since(cache: PagedCache, s: Any) -> None:
    batch, new = PagedBatch(cache, [s]), torch.zeros(1, 2, 1, 8)
    batch.write(0, new, new)
    cache.pool.commit(s)
    batch.write(0, new, new)


def attend(*shape: int, **how: Any) -> Callable[..., Any]:
    return lambda cache, s: PagedBatch(cache, [s]).attend(0, torch.zeros(shape), **how)


def grown(cache: PagedCache, s: Any) -> None:
    PagedBatch(cache, [s]).attend(0, QUERY.clone().requires_grad_())


FLASH = r"kernel 'flash_attn2' cannot read these blocks \(flash_attn2: it runs on CUDA"
REFUSED: Refused = {
    ValueError: {
        "sequence 0 has changed since this batch was made": stale,
        "4 of 5 tokens .* take num_tokens=1": committed,
        "5 of 5 tokens .* its last 1 cannot be written, append the next tokens": committed_since,
        "layer must be from 0": lambda c, s: PagedBatch(c, [s]).attend(1, QUERY),
        "num_tokens must be from 1 to 5, got 6": lambda c, s: PagedBatch(c, [s], 6),
        "num_tokens must be from 1 to 5, got 7": lambda c, s: PagedBatch(c, [s], [7]),
        "one for each of the 1, got 2": lambda c, s: PagedBatch(c, [s], [1, 2]),
        "num_tokens must be from 1 to 5, got 0": lambda c, s: PagedBatch(c, [s], 0),
        "sequences must differ": lambda c, s: PagedBatch(c, [s, s]),
        "freed already": lambda c, s: [c.pool.free(s), PagedBatch(c, [s])],
        r"query must be \(1, 2, 1, 8\) torch.float32": attend(1, 2, 2, 8),
        "query must have a multiple of the 2 heads": attend(1, 3, 1, 8),
        "unknown paged kernel 'x'; known": attend(1, 2, 1, 8, kernel="x"),
        FLASH: attend(1, 2, 1, 8, kernel="flash_attn2"),
        r"key must be \(1, 2, 1, 8\)": lambda c, s: PagedBatch(c, [s]).write(
            0, torch.zeros(1, 2, 2, 8), None, dealt=True
        ),
        r"value must be \(1, 2, 1, 8\)": lambda c, s: PagedBatch(c, [s]).write(
            0, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 4)
        ),
        "make the pool with world_size": lambda c, s: PagedBatch(
            PagedCache(BlockPool(4, 2, 2), 2, 8, 1), []
        ).decode(0, QUERY),
        "rank must be": lambda c, s: PagedCache(c.pool, 2, 8, 1, rank=1),
        "layer must be from 0 to 0": lambda c, s: c.gather(1, s),
    },
    TypeError: {
        "sequences must be a list": lambda c, s: PagedBatch(c, s),
        "sequence must be one that add": lambda c, s: PagedBatch(c, [3]),
        "query must be a tensor": lambda c, s: PagedBatch(c, [s]).attend(0, 3),
        "mask must be": attend(1, 2, 1, 8, mask="causal"),
        "pool must be a BlockPool": lambda c, s: PagedCache(4, 2, 8, 1),
    },
    NotImplementedError: {"query or sinks needs one": grown},
}
"""What is called with a cache and its sequence of 5 tokens; and the error."""


def test_refused() -> None:
    def run(call: Callable[..., Any]) -> None:
        cache = PagedCache(BlockPool(8, block=2), 2, 8, 1)
        call(cache, cache.pool.add(range(5)))

    check_refused(REFUSED, run)


def _decoded(case: PagedCase, sinks: list[float] | None) -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (case.world_size,), mesh_dim_names=("cp",))
    caches, sequences = case.filled()
    batch = PagedBatch(caches[mesh.get_local_rank()], sequences, case.num_tokens)
    given = None if sinks is None else torch.tensor(sinks, dtype=case.dtype)
    how = {"mask": case.mask, "scale": 0.3, "softcap": case.softcap}
    return batch.decode(0, case.query(), mesh=mesh, sinks=given, **how)


@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 2.0, 0.0]])
@pytest.mark.parametrize("world_size", [1, 3])
def test_decode_over_a_mesh(pool: Pool, world_size: int, sinks: list[float] | None) -> None:
    case = PagedCase(lengths=(30, 3, 17), num_tokens=3, world_size=world_size, mask=Mask.sliding(6))
    answers = pool.run(world_size, _decoded, case, sinks)
    out, lse = case.expected()
    if sinks is not None:
        sink = torch.tensor(sinks, dtype=torch.float64).view(1, -1, 1)
        out = out * (lse - torch.logaddexp(lse, sink)).exp().unsqueeze(-1)
        lse = torch.logaddexp(lse, sink)
    for found in answers:
        for x, dense in zip(found, (out, lse), strict=True):
            torch.testing.assert_close(x, dense.detach(), atol=1e-11, rtol=0)
    # All ranks sample from the same bits.
    assert all(
        torch.equal(x, y) for found in answers for x, y in zip(found, answers[0], strict=True)
    )


def _prefilled(world_size: int, num_cached: int) -> tuple[Tensor, list[int]]:
    """What the ring gives for the tokens that are not cached, and where this rank's are."""
    case = PagedCase(lengths=(21,), world_size=world_size)
    query, key, value = case.inputs()[0]
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    pool = BlockPool(16, block=4, world_size=world_size)
    cache = case.cache(pool, mesh.get_local_rank())
    first = pool.add(range(num_cached))
    if num_cached:
        cached = slice(num_cached)
        PagedBatch(cache, [first], num_cached).write(0, key[:, :, cached], value[:, :, cached])
    pool.commit(first)
    prompt = pool.add(range(21))
    assert prompt.num_cached == num_cached
    runs = pool.runs(prompt, num_cached)
    mine = [p for start, length in runs[cache.rank].tolist() for p in range(start, start + length)]
    batch = PagedBatch(cache, [prompt], 21 - num_cached)
    batch.write(0, key[:, :, mine], value[:, :, mine], dealt=True)
    out = ring_attention(
        *(query[:, :, mine], *cache.gather(0, prompt)),
        runs=torch.from_numpy(runs),
        key_runs=torch.from_numpy(pool.runs(prompt)),
        scale=0.3,
        mesh=mesh,
    )
    return out, mine


@pytest.mark.parametrize("num_cached", [0, 8, 20])
def test_the_ring_prefills_what_is_not_cached(pool: Pool, num_cached: int) -> None:
    dense, _ = PagedCase(lengths=(21,), num_tokens=21).expected()
    answers = pool.run(3, _prefilled, 3, num_cached)
    assert sorted(p for _, mine in answers for p in mine) == [*range(num_cached, 21)]
    for out, mine in answers:
        torch.testing.assert_close(out, dense[:, :, mine].detach(), atol=1e-11, rtol=0)


class Failing(Exception):
    """What a rank without memory raises."""


def _alone_without_memory(world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    cache = PagedCache(BlockPool(4, 2, world_size), 2, 8, 1, mesh.get_local_rank())
    batch, query = PagedBatch(cache, [cache.pool.add([1, 2, 3])]), torch.zeros(1, 2, 1, 8)
    batch.decode(0, query, mesh=mesh)
    if mesh.get_local_rank() == 1:
        failing = patch.object(PagedStep, "forward", side_effect=Failing("no memory"))
        with failing, pytest.raises(Failing):
            batch.decode(0, query, mesh=mesh)
    with pytest.raises(RingError) as caught:
        batch.decode(0, query, mesh=mesh)
    return str(caught.value)


def test_a_rank_raises_before_the_merge(pool: Pool) -> None:
    """The others are told at once: they do not wait for the group's timeout."""
    texts = pool.run(2, _alone_without_memory, 2)
    assert all("rank 1 raised, in decode, step 0: Failing: no memory" in text for text in texts)
