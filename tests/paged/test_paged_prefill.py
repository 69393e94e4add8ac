"""Prompts that are prefilled into a paged cache, packed or by rows, attend as if alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import BlockPool, Mask, PagedBatch, PagedCache, merge_attention, ring_attention
from dtensor_ring.paged.prefill import PackedPrompts, PagedPrefill
from tests.dense import dense_attention, visible
from tests.paged.test_paged_cache import paged_cases
from tests.paged_attention import TOLERANCES, PagedCase
from tests.pool import Pool

STEPS = ((5, 0, 3), (1, 4, 0), (8, 1, 6), (7, 13, 2))
"""Tokens of each prompt in each step."""
LENGTHS = tuple(map(sum, zip(*STEPS, strict=True)))


def _in_steps(case: PagedCase) -> list[tuple[int, int, Tensor]]:
    """By prompt and position, what the ring gives."""
    inputs = case.inputs()
    mesh = init_device_mesh("cpu", (case.world_size,), mesh_dim_names=("cp",))
    pool = BlockPool(24, case.block, case.world_size)
    cache, found = case.cache(pool, mesh.get_local_rank()), []
    prompts = [pool.add(range(100 * i, 100 * i + n)) for i, n in enumerate(LENGTHS)]
    for num_tokens in STEPS:
        chunks = [(i, x, n) for i, (x, n) in enumerate(zip(prompts, num_tokens, strict=True)) if n]
        step = PagedPrefill(cache, [(x, n) for _, x, n in chunks])
        where = [(i, p) for i, x, n in chunks for p in range(x.num_written, x.num_written + n)]
        mine = [(i, p) for i, p in where if pool.dealing.owner(p // case.block) == cache.rank]
        assert step.positions.tolist() == [p for _, p in mine]
        parts = zip(*[[x[:, :, p : p + 1] for x in inputs[i]] for i, p in mine], strict=True)
        query, key, value = (torch.cat(x, 2) for x in parts) if mine else _nothing(case)
        step.write(0, key, value)
        keys, values = step.gather(0, key, value)
        assert keys.shape[2] == values.shape[2] == step.num_columns
        how = {"runs": step.runs, "key_runs": step.key_runs, "slices": step.slices(case.mask)}
        out = ring_attention(query, keys, values, mesh=mesh, scale=0.3, **how)
        found += [(i, p, out[:, :, [row]]) for row, (i, p) in enumerate(mine)]
        for _, x, n in chunks:
            pool.commit(x, x.num_written + n)
    with pytest.raises(ValueError, match="num_tokens must be from 1 to 0, got 1"):
        PagedPrefill(cache, [(prompts[0], 1)])
    return found


def _nothing(case: PagedCase) -> list[Tensor]:
    return [x[:, :, :0] for x in case.inputs()[0]]


@pytest.mark.parametrize(("world_size", "mask"), [(3, Mask.causal()), (2, Mask.sliding(6))])
def test_prompts_in_steps(pool: Pool, world_size: int, mask: Mask) -> None:
    case = PagedCase(lengths=LENGTHS, world_size=world_size, mask=mask)
    inputs = case.inputs()
    dense = [replace(case, num_tokens=len(x[0][0, 0]))._dense(*x).out for x in inputs]
    answers = [x for found in pool.run(world_size, _in_steps, case) for x in found]
    assert sorted((i, p) for i, p, _ in answers) == [
        (i, p) for i, n in enumerate(LENGTHS) for p in range(n)
    ]
    for prompt, position, out in answers:
        expected = dense[prompt][:, :, [position]].detach()
        torch.testing.assert_close(out, expected, atol=1e-11, rtol=0)


def _sharing(case: PagedCase) -> list[Tensor]:
    """What the ring gives to prompts that share two blocks, which were written once."""
    query, key, value = case.inputs()[0]
    mesh = init_device_mesh("cpu", (case.world_size,), mesh_dim_names=("cp",))
    pool = BlockPool(24, case.block, case.world_size)
    cache = case.cache(pool, mesh.get_local_rank())
    first = pool.add(range(21))
    begin = PagedPrefill(cache, [(first, 8)])
    begin.write(0, *(x[:, :, begin.positions] for x in (key, value)))
    pool.commit(first, 8)
    # All have the same tokens, but the pool does not know it: the first one is not committed.
    chunks = [(first, 13), (pool.add(range(21)), 13), (pool.add(range(21)), 5)]
    step = PagedPrefill(cache, chunks)
    new = [x[:, :, step.positions] for x in (query, key, value)]
    step.write(0, *new[1:])
    keys, values = step.gather(0, *new[1:])
    assert step.key_runs[..., 1].sum() == 8 + 13 + 13 + 5
    how = {"runs": step.runs, "key_runs": step.key_runs, "slices": step.slices(case.mask)}
    out = ring_attention(new[0], keys, values, mesh=mesh, scale=0.3, **how)
    return [out, step.positions]


@pytest.mark.parametrize(("world_size", "mask"), [(2, Mask.causal()), (1, Mask.sliding(6))])
def test_what_prompts_share_is_there_once(pool: Pool, world_size: int, mask: Mask) -> None:
    case = PagedCase(lengths=(21,), num_tokens=21, world_size=world_size, mask=mask)
    dense, _ = case.expected()
    for out, positions in pool.run(world_size, _sharing, case):
        torch.testing.assert_close(out, dense[:, :, positions].detach(), atol=1e-11, rtol=0)


def test_what_is_refused() -> None:
    case = PagedCase(lengths=(9,))
    pool = BlockPool(8, 4)
    cache, prompt = case.cache(pool, 0), pool.add(range(9))
    _, key, value = case.inputs()[0]
    with pytest.raises(TypeError, match="cache must be a PagedCache"):
        PagedPrefill(pool, [(prompt, 1)])  # pyrefly: ignore[bad-argument-type]
    for chunks in ([], [(prompt, 1), (prompt, 2)]):
        with pytest.raises(ValueError, match="one sequence or several, each once"):
            PagedPrefill(cache, chunks)
    step = PagedPrefill(cache, [(prompt, 5)])
    with pytest.raises(ValueError, match=r"key must be \(1, 2, 5, 8\)"):
        step.write(0, key, value)
    with pytest.raises(ValueError, match="layer must be from 0 to 0, got 1"):
        step.write(1, key[:, :, :5], value[:, :, :5])
    pool.append(prompt, [1])
    with pytest.raises(ValueError, match="has changed since this step was made"):
        step.gather(0, key[:, :, :5], value[:, :, :5])


def _from_blocks(case: PagedCase) -> tuple[Tensor, ...]:
    """Attention to blocks as they are, and to blocks of which a model made twice as many heads."""
    mesh = init_device_mesh("cpu", (case.world_size,), mesh_dim_names=("cp",))
    caches, sequences = case.filled()
    batch = PagedBatch(caches[mesh.get_local_rank()], sequences, case.num_tokens)
    keys, values = batch.blocks(0)
    how = {"mesh": mesh, "mask": case.mask, "scale": 0.3}
    plain, _ = batch.decode(0, case.query(), **how)
    same, _ = batch.decode(0, case.query(), blocks=(keys, values), **how)
    more = keys.repeat_interleave(2, 2), 2 * values.repeat_interleave(2, 2)
    twice, _ = batch.decode(0, case.query(), blocks=more, **how)
    with pytest.raises(ValueError, match=r"keys of blocks must be .* made of what blocks"):
        batch.decode(0, case.query(), blocks=(keys[1:], values[1:]), **how)
    return plain, same, twice / 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_blocks_that_a_model_expands(pool: Pool, world_size: int) -> None:
    """One sequence has no block on some ranks of three."""
    case = PagedCase(lengths=(30, 3, 17), num_tokens=2, world_size=world_size)
    dense, _ = case.expected()
    for found in pool.run(world_size, _from_blocks, case):
        for out in found:
            torch.testing.assert_close(out, dense.detach(), atol=1e-11, rtol=0)


MASKS = [
    Mask.causal(),
    Mask.full(),
    Mask.sliding(3),
    Mask.local(5, 1),
    Mask.chunked(7),
    Mask.prefix_causal(5),
]


def prompts(world_size: int) -> tuple[BlockPool, list[tuple[object, int]]]:
    """Some share blocks; of some a part of a block is held, or nothing."""
    pool = BlockPool(64, block=4, world_size=world_size)
    first = pool.add(range(21))
    pool.commit(first, 14)
    chunks = [(first, 5)]
    for tokens, num_tokens in (
        ([*range(12), 50, 51], 2),  # three blocks of the first one
        ([*range(12), 60], 1),  # and these again
        ([*range(4), 70, 71, 72, 73, 74], 4),  # one of them
        (range(80, 86), 6),
    ):
        chunks.append((pool.add(tokens), num_tokens))
    return pool, chunks  # type: ignore[return-value]


def positions(runs: np.ndarray) -> list[int]:
    return [p for row in runs.tolist() for start, n in row for p in range(start, start + n)]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_each_prompt_sees_what_it_sees_alone(mask: Mask, world_size: int) -> None:
    pool, chunks = prompts(world_size)
    packed = PackedPrompts(chunks, pool.dealing)  # type: ignore[arg-type]
    # 14 tokens of the first prompt, whose first 12 others share.
    assert packed.num_cached == 14
    queries, keys = (sorted(positions(x)) for x in (packed.query_runs, packed.key_runs))
    assert keys == [*range(14 + 18)]
    assert queries == keys[14:]
    slices, found = packed.slices(mask), np.zeros((len(keys), len(keys)), dtype=bool)
    slices.check(len(keys), len(keys))
    for pieces in packed.prompts:
        begin, end = pieces[-1].tokens
        alone = visible(mask, (end, end), 1)[0, 0].numpy()
        at = [p + x.shift for x in pieces for p in range(*x.tokens)]
        assert len(at) == end
        found[np.ix_(at[begin:], at)] = alone[begin:]
    seen = [[slices.sees(query, key) for key in keys] for query in queries]
    assert np.array_equal(seen, found[14:])


def test_who_sees_the_same_is_joined() -> None:
    """Queries of neighbours that see all of a beginning are one slice."""
    pool = BlockPool(64, block=4)
    first = pool.add(range(9))
    pool.commit(first, 8)
    chunks = [(first, 1), *((pool.add([*range(8), x, x]), 2) for x in (20, 30, 40))]
    (table,) = PackedPrompts(chunks, pool.dealing).slices(Mask.causal()).tables
    assert table[0, :4].tolist() == [8, 15, 0, 8]
    assert len(table) == 5


Counts = tuple[int, ...]

CASES: dict[str, tuple[PagedCase, Counts]] = {
    "one": (PagedCase(), (4,)),
    "many": (PagedCase(lengths=(1, 9, 30, 4), world_size=2), (1, 3, 7, 4)),
    "more than a block": (PagedCase(lengths=(30, 21), block=2, world_size=3), (17, 1)),
    "window": (PagedCase(lengths=(30, 9, 40), mask=Mask.sliding(6), world_size=2), (5, 2, 1)),
    "a window of blocks": (
        PagedCase(lengths=(60, 41), mask=Mask.sliding(17), world_size=2),
        (6, 3),
    ),
    "chunks": (PagedCase(lengths=(30, 29), mask=Mask.chunked(7), world_size=2), (5, 3)),
    "bfloat16": (PagedCase(lengths=(30, 9), dtype=torch.bfloat16), (3, 5)),
    "one each": (PagedCase(lengths=(30, 9), world_size=2), (1, 1)),
    "gathered": (PagedCase(lengths=(30, 9), kernel="gathered", world_size=3), (4, 2)),
}


def expected(case: PagedCase, counts: Counts) -> tuple[Tensor, Tensor]:
    """What each token sees as the last one of its sequence."""
    found = []
    for tensors, count in zip(case.inputs(), counts, strict=True):
        length = tensors[1].shape[2]
        for end in range(length - count + 1, length + 1):
            query, key, value = (x[:, :, :end] for x in tensors)
            seen = visible(case.mask, (end, end), 1)[:, 0, -1:]
            how = {"scale": 0.3, "softcap": case.softcap, "seen": seen}
            found.append(dense_attention(query[:, :, -1:], key, value, case.mask, **how))
    return torch.cat([x.out for x in found]), torch.cat([x.lse for x in found])


def check(case: PagedCase, counts: Counts) -> None:
    caches, sequences = case.filled()
    last = [
        query[0, :, -n:].transpose(0, 1)
        for (query, _, _), n in zip(case.inputs(), counts, strict=True)
    ]
    how = {"mask": case.mask, "scale": 0.3, "softcap": case.softcap, "kernel": case.kernel}
    batches = [PagedBatch(cache, sequences, counts) for cache in caches]
    parts = [x.attend(0, torch.cat(last).unsqueeze(2), **how) for x in batches]
    tolerance = TOLERANCES[case.dtype]
    for x, dense in zip(merge_attention(parts), expected(case, counts), strict=True):
        torch.testing.assert_close(x.double(), dense.detach(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_tokens_as_if_each_were_the_last(name: str) -> None:
    check(*CASES[name])


@st.composite
def cases(draw: st.DrawFn) -> tuple[PagedCase, Counts]:
    left, chunk = draw(st.none() | st.integers(0, 20)), draw(st.none() | st.integers(1, 9))
    mask = Mask(left, 0) if chunk is None else Mask.chunked(chunk)
    case = replace(draw(paged_cases()), mask=mask)
    return case, tuple(draw(st.integers(1, min(8, n))) for n in case.lengths)


def test_random_tokens() -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(cases())
    def check_any(drawn: tuple[PagedCase, Counts]) -> None:
        check(*drawn)

    check_any()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_writes_are_those_of_one_token_at_a_time(world_size: int) -> None:
    """Each token goes to the rank and the slot of its position."""
    counts, found = (3, 1, 6), []
    for is_ragged in (True, False):
        pool = BlockPool(8, block=2, world_size=world_size)
        caches = [PagedCache(pool, 1, 1, 1, rank) for rank in range(world_size)]
        for kind, count in enumerate(counts):
            pool.add(range(10 * kind, 10 * kind + count))
        sequences = [*pool._sequences.values()]
        new = torch.arange(sum(counts), dtype=torch.float32)[:, None, None, None]
        for cache in caches:
            if is_ragged:
                PagedBatch(cache, sequences, counts).write(0, new, new)
                continue
            for sequence, part in zip(sequences, new.split(counts), strict=True):
                row = part.transpose(0, 2)
                PagedBatch(cache, [sequence], len(sequence)).write(0, row, row)
        found.append([cache.layer(0)[0] for cache in caches])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
