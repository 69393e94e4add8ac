"""New tokens select among cached keys of all ranks, and attend to them: as on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import Mask, decode_select_keys, decode_selected_attention
from dtensor_ring.planning.tile import CAUSAL, FULL
from tests.decode.test_decode_messages import Counted
from tests.pool import Pool, on_ranks
from tests.rings import Ring
from tests.selected.indexers import Indexer, dense

RUNS = (((0, 3), (9, 2)), ((3, 6), (11, 5)), ())
END = 16


@dataclass(frozen=True)
class Case:
    num_queries: int = 1
    k: int = 4
    with_weights: bool = True
    latent: bool = True
    sinks: tuple[float, ...] = ()
    documents: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    block_size: int = 1
    local_blocks: int = 0
    mask: Mask = CAUSAL

    def indexer(self) -> Indexer:
        """Of all tokens; the last ones are new."""
        from dtensor_ring import Contiguous

        documents = None if self.documents is None else (self.documents,)
        ring = Ring(Contiguous(), 1, END, self.mask, documents)
        blocks = self.block_size, self.local_blocks
        return Indexer(ring, self.k, 4, self.with_weights, *blocks, scale=0.5)

    def tensors(self) -> list[Tensor]:
        """Query, key and value of all tokens."""
        generator = torch.Generator().manual_seed(2)
        shapes = (2, 4, END, 6), (2, 1 if self.latent else 4, END, 6), (2, 4, END, 3)
        return [torch.randn(*x, generator=generator).to(self.dtype) for x in shapes]


CASES = {
    "one token": Case(),
    "five tokens, more keys than there are": Case(5, 20),
    "heads apart": Case(3, 2, with_weights=False, latent=False),
    "sinks": Case(2, sinks=(0.5, -1.0, 2.0, 0.0)),
    "documents": Case(3, documents=(0, 11, 16)),
    "bfloat16": Case(2, dtype=torch.bfloat16),
    "blocks on several ranks": Case(5, 1, with_weights=False, latent=False, block_size=5),
    "local blocks, heads apart": Case(
        3, 2, with_weights=False, latent=False, block_size=4, local_blocks=1
    ),
    "more blocks than there are": Case(1, 9, block_size=3),
    "blocks of documents": Case(3, 2, documents=(0, 5, 16), block_size=4, local_blocks=1),
    "blocks in a window": Case(2, 2, block_size=4, mask=Mask.sliding(6)),
    "blocks of all keys": Case(2, 2, block_size=6, mask=FULL),
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_one_process(pool: Pool, case: Case, world_size: int) -> None:
    first, *others = pool.run(world_size, _of_rank, case)
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True)), "the same bits"
    found, out = first
    new = slice(END - case.num_queries, END)
    expected = case.indexer().expected()[:, :, new]
    assert torch.equal(found.view_as(expected), expected)
    query, key, value = case.tensors()
    value = key[..., :4] if case.latent else value
    sinks = torch.tensor(case.sinks).double() if case.sinks else None
    right, _ = dense(query[:, :, new], key, value, expected, 6**-0.5, sinks)
    tolerance = 3e-2 if case.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.double(), right, atol=tolerance, rtol=0)


def _of_rank(case: Case) -> tuple[Tensor, Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    runs = RUNS if size == 3 else (((0, END),),)
    mine = torch.tensor([x for start, n in runs[rank] for x in range(start, start + n)]).long()
    table = torch.tensor([[*row, *[(0, 0)] * (2 - len(row))] for row in runs]).int()
    where: dict[str, Any] = {"key_runs": table, "mesh": init_device_mesh("cpu", (size,))}
    new = slice(END - case.num_queries, END)
    query, key, weights = case.indexer().inputs()
    given = query[:, :, new].transpose(1, 2), key[:, 0, mine]
    weights = None if weights is None else weights[:, :, new].transpose(1, 2)
    bounds = None if case.documents is None else torch.tensor(case.documents).int()
    how: dict[str, Any] = {"scale": 0.5, "mask": case.mask, "cu_seqlens": bounds}
    how |= {"block_size": case.block_size, "local_blocks": case.local_blocks}
    with torch.no_grad():
        found = decode_select_keys(*given, weights, case.k, **how, **where)
        query, key, value = case.tensors()
        values: Any = 4 if case.latent else value[:, :, mine]
        sinks = torch.tensor(case.sinks).double() if case.sinks else None
        out = decode_selected_attention(
            query[:, :, new], key[:, :, mine], values, found, sinks=sinks, **where
        )
    return found, out


@on_ranks(1)
def test_blocks_of_rows_apart() -> None:
    mesh = init_device_mesh("cpu", (1,))
    given = torch.ones(2, 1, 2, 3), torch.ones(2, 9, 3), torch.ones(2, 1, 2), 1
    starts = torch.tensor([7, 8])
    with pytest.raises(ValueError, match=r"for all rows with block_size=4, got \[7, 8\]"):
        decode_select_keys(*given, block_size=4, query_starts=starts, mesh=mesh)
    with pytest.raises(ValueError, match="local_blocks=1 needs blocks"):
        decode_select_keys(*given, local_blocks=1, mesh=mesh)


def test_one_message_more(pool: Pool) -> None:
    """To each other rank: best keys travel with the call record, and so do partial results."""
    assert pool.run(3, _messages) == [(4, 0)] * 3


def _messages() -> tuple[int, int]:
    _of_rank(CASES["one token"])
    with Counted() as counted:
        _of_rank(CASES["one token"])
    return counted.record_works, counted.others


@on_ranks(1)
def test_no_gradient() -> None:
    query = torch.randn(1, 2, 1, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradient"):
        decode_selected_attention(query, torch.randn(1, 1, 3, 4), 4, torch.zeros(1, 1, 1).int())
