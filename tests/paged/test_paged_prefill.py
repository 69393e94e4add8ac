"""Prompts that are prefilled in steps, and batches that attend to what a model made of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import BlockPool, Mask, PagedBatch, ring_attention
from dtensor_ring.paged.prefill import PagedPrefill
from tests.paged_attention import PagedCase
from tests.pool import Pool

CHUNKS = (5, 1, 8, 7)


def _in_chunks(case: PagedCase) -> list[tuple[Tensor, Tensor]]:
    """What the ring gives for each chunk, and where this rank's tokens are."""
    query, key, value = case.inputs()[0]
    mesh = init_device_mesh("cpu", (case.world_size,), mesh_dim_names=("cp",))
    pool = BlockPool(16, case.block, case.world_size)
    cache, prompt, found = case.cache(pool, mesh.get_local_rank()), pool.add(range(21)), []
    for num_tokens in CHUNKS:
        step = PagedPrefill(cache, prompt, num_tokens)
        mine = step.positions
        step.write(0, key[:, :, mine], value[:, :, mine])
        keys, values = step.gather(0)
        assert keys.shape[2] == values.shape[2] == step.num_columns
        how = {"runs": step.runs, "key_runs": step.key_runs, "mask": case.mask, "scale": 0.3}
        found.append((ring_attention(query[:, :, mine], keys, values, mesh=mesh, **how), mine))
        pool.commit(prompt, step.end)
    with pytest.raises(ValueError, match="num_tokens must be from 1 to 0, got 1"):
        PagedPrefill(cache, prompt, 1)
    return found


@pytest.mark.parametrize(("world_size", "mask"), [(3, Mask.causal()), (2, Mask.sliding(6))])
def test_a_prompt_in_chunks(pool: Pool, world_size: int, mask: Mask) -> None:
    case = PagedCase(lengths=(21,), num_tokens=21, world_size=world_size, mask=mask)
    dense, _ = case.expected()
    answers = pool.run(world_size, _in_chunks, case)
    positions = sorted(p for found in answers for _, mine in found for p in mine.tolist())
    assert positions == [*range(21)]
    for found in answers:
        for out, mine in found:
            torch.testing.assert_close(out, dense[:, :, mine].detach(), atol=1e-11, rtol=0)


def test_what_is_refused() -> None:
    case = PagedCase(lengths=(9,))
    pool = BlockPool(8, 4)
    cache, prompt = case.cache(pool, 0), pool.add(range(9))
    _, key, value = case.inputs()[0]
    with pytest.raises(TypeError, match="cache must be a PagedCache"):
        PagedPrefill(pool, prompt, 1)  # pyrefly: ignore[bad-argument-type]
    step = PagedPrefill(cache, prompt, 5)
    with pytest.raises(ValueError, match=r"key must be \(1, 2, 5, 8\)"):
        step.write(0, key, value)
    with pytest.raises(ValueError, match="layer must be from 0 to 0, got 1"):
        step.write(1, key[:, :, :5], value[:, :, :5])
    pool.append(prompt, [1])
    with pytest.raises(ValueError, match="has changed since this step was made"):
        step.gather(0)


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
