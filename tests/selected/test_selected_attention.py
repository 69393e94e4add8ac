"""Attention to selected keys equals dense attention in float64, also of new tokens over a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring import (
    Mask,
    SequenceAxis,
    decode_select_keys,
    decode_selected_attention,
    selected_attention,
)
from dtensor_ring.planning.tile import CAUSAL, FULL
from dtensor_ring.selected import listed_attention
from tests.decode.test_decode_messages import Counted
from tests.pool import Pool, on_ranks
from tests.rings import Ring
from tests.selected.indexers import Indexer, dense

SINKS = (0.5, -1.0, 2.0, 0.0)


@dataclass(frozen=True)
class Case:
    """An attention of 4 heads to lists of keys, with the same global inputs on each rank."""

    layout: str = "zigzag"
    seq_len: int = 16
    num_key_heads: int = 2
    num_groups: int = 1
    num_listed: int = 3
    latent: int | None = None
    """The first so many numbers of a key are its value."""
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    route: str | None = None
    grad_lse: bool = False
    in_front: bool = False
    """All queries select among the first few keys."""

    def inputs(self) -> list[Tensor]:
        """Query, key, value and gradients of out and lse; then the lists."""
        generator, seq_len = torch.Generator().manual_seed(3), self.seq_len
        value_dim = self.latent or 5
        shapes = [(4, 6), (self.num_key_heads, 6), (self.num_key_heads, value_dim), (4, value_dim)]
        tensors = [torch.randn(2, n, seq_len, d, generator=generator) for n, d in shapes]
        if self.latent:
            tensors[2] = tensors[1][..., : self.latent]
        grad_lse = torch.randn(2, 4, seq_len, generator=generator)
        most = 4 if self.in_front else seq_len
        order = torch.rand(2, self.num_groups, seq_len, most, generator=generator).argsort(-1)
        listed = order[..., : self.num_listed].int()
        listed[order[..., : listed.shape[-1]] > torch.arange(seq_len).view(1, 1, -1, 1)] = -1
        return [x.to(self.dtype) for x in (*tensors, grad_lse)] + [listed]


CASES = {
    "grouped": Case(),
    "one key head": Case(num_key_heads=1),
    "heads apart": Case(num_key_heads=4, num_groups=2, layout="contiguous"),
    "latents": Case(num_key_heads=1, latent=4),
    "latents, all of a key": Case(num_key_heads=1, latent=6, layout="striped"),
    "sinks and lse": Case(sinks=True, grad_lse=True),
    "all travel": Case(route="all", layout="contiguous"),
    "nearly all": Case(num_listed=15),
    "of one rank": Case(in_front=True, layout="contiguous"),
    "float32": Case(dtype=torch.float32, sinks=True),
    "bfloat16": Case(dtype=torch.bfloat16, num_key_heads=1, latent=4),
    "blocks of tokens": Case(layout="block_cyclic:3", seq_len=14),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def expected(case: Case) -> list[Tensor]:
    """Out, lse, and gradients of query, key, value (or key alone), and sinks."""
    query, key, value, grad_out, grad_lse, listed = case.inputs()
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    if case.latent:
        leaves[2] = leaves[1][..., : case.latent]
    sinks = torch.tensor(SINKS).double().requires_grad_() if case.sinks else None
    out, lse = dense(*leaves, listed, 0.3, sinks)
    wanted = [*leaves[: 2 if case.latent else 3], *([] if sinks is None else [sinks])]
    loss = (out * grad_out.double()).sum()
    if case.grad_lse:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * grad_lse.double()).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, wanted)]


def of_rank(case: Case, mesh: DeviceMesh, mine: Tensor, **how: Any) -> list[Tensor]:
    """The same of a rank's shards."""
    query, key, value, grad_out, grad_lse, listed = case.inputs()
    leaves = [x[:, :, mine].requires_grad_() for x in (query, key, value)]
    sinks = torch.tensor(SINKS, dtype=torch.float64).requires_grad_() if case.sinks else None
    given = case.latent or leaves[2]
    out, lse = selected_attention(
        *(leaves[0], leaves[1], given, listed[:, :, mine]),
        scale=0.3, sinks=sinks, route=case.route, return_lse=True, mesh=mesh, **how,
    )  # fmt: skip
    wanted = [*leaves[: 2 if case.latent else 3], *([] if sinks is None else [sinks])]
    grads = (grad_out[:, :, mine], grad_lse[:, :, mine].to(lse.dtype))
    outputs = (out, lse) if case.grad_lse else (out,)
    return [
        out.detach(),
        lse.detach(),
        *torch.autograd.grad(outputs, wanted, grads[: len(outputs)]),
    ]


def check_case(case: Case) -> None:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    axis = SequenceAxis(mesh, case.layout)
    mine = axis.positions(case.seq_len)
    found = of_rank(case, mesh, mine, seq_len=case.seq_len)
    for number, (actual, whole) in enumerate(zip(found, expected(case), strict=True)):
        of_sinks = case.sinks and number == len(found) - 1
        if of_sinks:
            dist.all_reduce(actual)
        part = whole if of_sinks else whole[:, :, mine]
        tolerance = TOLERANCES[case.dtype] * max(
            1.0, whole.nan_to_num(neginf=0.0).abs().max().item()
        )
        torch.testing.assert_close(actual.double(), part, atol=tolerance, rtol=0)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.repeats)])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_dense_attention(pool: Pool, case: Case, world_size: int) -> None:
    pool.run(world_size, check_case, case)


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_numbers_of_ranks(pool: Pool, world_size: int) -> None:
    pool.run(world_size, check_case, Case(layout="contiguous", seq_len=15))


@on_ranks(2)
def test_chunks_of_one_query() -> None:
    listed_attention.CHUNK, before = 1, listed_attention.CHUNK
    try:
        check_case(CASES["sinks and lse"])
    finally:
        listed_attention.CHUNK = before


RUNS = (((0, 3), (9, 2)), ((3, 6), (11, 5)), ())
END = 16


@dataclass(frozen=True)
class Decoded:
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


DECODED = {
    "one token": Decoded(),
    "five tokens, more keys than there are": Decoded(5, 20),
    "heads apart": Decoded(3, 2, with_weights=False, latent=False),
    "sinks": Decoded(2, sinks=(0.5, -1.0, 2.0, 0.0)),
    "documents": Decoded(3, documents=(0, 11, 16)),
    "bfloat16": Decoded(2, dtype=torch.bfloat16),
    "blocks on several ranks": Decoded(5, 1, with_weights=False, latent=False, block_size=5),
    "local blocks, heads apart": Decoded(
        3, 2, with_weights=False, latent=False, block_size=4, local_blocks=1
    ),
    "more blocks than there are": Decoded(1, 9, block_size=3),
    "blocks of documents": Decoded(3, 2, documents=(0, 5, 16), block_size=4, local_blocks=1),
    "blocks in a window": Decoded(2, 2, block_size=4, mask=Mask.sliding(6)),
    "blocks of all keys": Decoded(2, 2, block_size=6, mask=FULL),
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("case", DECODED.values(), ids=list(DECODED))
def test_equals_one_process(pool: Pool, case: Decoded, world_size: int) -> None:
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


def _of_rank(case: Decoded) -> tuple[Tensor, Tensor]:
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
    _of_rank(DECODED["one token"])
    with Counted() as counted:
        _of_rank(DECODED["one token"])
    return counted.record_works, counted.others


@on_ranks(1)
def test_no_gradient() -> None:
    query = torch.randn(1, 2, 1, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradient"):
        decode_selected_attention(query, torch.randn(1, 1, 3, 4), 4, torch.zeros(1, 1, 1).int())
