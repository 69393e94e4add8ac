"""Sequences in blocks over the ranks of a mesh: decoded, prefilled, and a rank that raises."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import BlockPool, Mask, RingError, ring_attention
from dtensor_ring.paged.api import PagedBatch, PagedCache
from dtensor_ring.paged.run import PagedStep
from tests.paged_attention import PagedCase
from tests.pool import Pool


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
