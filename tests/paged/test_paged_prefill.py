"""Prompts that are prefilled in steps, and batches that attend to what a model made of blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import BlockPool, Mask, PagedBatch, ring_attention
from dtensor_ring.paged.prefill import PagedPrefill
from tests.paged_attention import PagedCase
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
