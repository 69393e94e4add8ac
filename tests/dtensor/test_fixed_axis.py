"""Attention of an axis whose sums have a fixed order, over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import (
    Mask,
    SequenceAxis,
    TransferPolicy,
    decode_selected_attention,
    ring_attention,
    shard_sequence,
    sum_over_sequence,
    unshard_sequence,
)
from tests.pool import Pool, on_ranks

FIXED = TransferPolicy(order="fixed", block=16)
SEQ_LEN = 56
HOWS = [
    ("zigzag", "ring"),
    ("contiguous", "all_gather"),
    ("striped", "ulysses"),
    ("whole_blocks:16", "ring"),
]


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, SEQ_LEN, 32) for heads in (8, 4, 4, 8)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _attend(layout: str, strategy: str, compiled: bool = False) -> list[Tensor]:
    """Out and gradients, whole, of DTensors."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    axis = SequenceAxis(mesh, layout, strategy=strategy, policy=FIXED)
    axis.prepare(SEQ_LEN, mask=Mask.sliding(20))
    *inputs, grad = _inputs()
    sharded = [axis.shard(x, 2).requires_grad_() for x in inputs]
    attend = torch.compile(ring_attention, backend="aot_eager") if compiled else ring_attention
    out = attend(*sharded, mask=Mask.sliding(20), **({} if compiled else {"validate": True}))
    grads = torch.autograd.grad(out, sharded, axis.shard(grad, 2))
    return [unshard_sequence(x.detach(), 2) for x in (out, *grads)]


def test_dtensors_of_any_layout_have_the_same_bits(pool: Pool) -> None:
    (alone,) = pool.run(1, _attend, "contiguous", "ring")
    for layout, strategy in HOWS:
        for of_rank in pool.run(4, _attend, layout, strategy):
            for x, wanted in zip(of_rank, alone, strict=True):
                assert torch.equal(x, wanted), (layout, strategy)


@pytest.mark.parametrize("layout", ["zigzag", "whole_blocks:16"])
def test_so_have_compiled_ones(pool: Pool, layout: str) -> None:
    (alone,) = pool.run(1, _attend, "contiguous", "ring")
    for of_rank in pool.run(2, _attend, layout, "ring", True):
        for x, wanted in zip(of_rank, alone, strict=True):
            assert torch.equal(x, wanted)


def _summed() -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    axis = SequenceAxis(mesh, "zigzag")
    whole = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    local = whole[:, axis.positions(1000)].requires_grad_()
    total = sum_over_sequence(local, mesh, dim=1)
    torch.testing.assert_close(total, whole.sum(1), rtol=1e-5, atol=1e-4)
    (grad,) = torch.autograd.grad(total.sum(), local)
    assert torch.equal(grad, torch.full_like(grad, float(dist.get_world_size())))
    return total.detach()


def test_sums_of_tokens_have_the_same_bits(pool: Pool) -> None:
    totals = [x for size in (1, 2, 4) for x in pool.run(size, _summed)]
    assert all(torch.equal(x, totals[0]) for x in totals)


def _decode_selected(mesh: Any, query: Tensor, key: Tensor) -> None:
    selected = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    decode_selected_attention(query[:, :, :1], key, key, selected, mesh=mesh)


def _copied_heads(mesh: Any, query: Tensor, key: Tensor) -> None:
    ring_attention(query, key[:, :1], key[:, :1], mesh=mesh, strategy="ulysses")


def _continued(mesh: Any, query: Tensor, key: Tensor) -> None:
    runs = torch.tensor([[[0, 32]], [[32, 32]]])
    ring_attention(query, key, key, mesh=mesh, runs=runs, key_runs=runs)


REFUSED = [
    (_decode_selected, "decode_selected_attention has no sums in a fixed order"),
    (_copied_heads, "needs a key head for each of the 2 ranks"),
    (_continued, "key_runs are for queries that continue one"),
]


@on_ranks(2)
def test_what_is_not_served_is_refused_on_every_rank() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    SequenceAxis(mesh, "contiguous", policy=FIXED)
    query, key = torch.randn(1, 4, 32, 32), torch.randn(1, 2, 32, 32)
    for call, sentence in REFUSED:
        with pytest.raises(ValueError, match=sentence):
            call(mesh, query, key)
    sharded = [shard_sequence(torch.randn(1, 2, 64, 8), mesh, 2) for _ in range(3)]
    ring_attention(*sharded)  # the ranks still agree


def test_policies_that_round_are_refused() -> None:
    for how in ({"kv_dtype": "int8"}, {"grad_dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match="sends keys and values as they are"):
            TransferPolicy(order="fixed", **how)
    with pytest.raises(ValueError, match='order must be None or "fixed"'):
        TransferPolicy(order="sorted")
    with pytest.raises(ValueError, match="block=8 is for order"):
        TransferPolicy(block=8)
