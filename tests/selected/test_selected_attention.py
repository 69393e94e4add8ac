"""Attention to selected keys equals dense attention in float64, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring import SequenceAxis, selected_attention
from dtensor_ring.selected import listed_attention
from tests.pool import Pool, on_ranks
from tests.selected.indexers import dense

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
