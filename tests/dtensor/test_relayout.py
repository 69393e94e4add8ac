"""`relayout` and `exchange`, as users call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring import Balanced, Mask, SequenceAxis, Striped, exchange, relayout, shard_sequence
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.run_table import as_layout
from tests.pool import on_ranks

BALANCED = Balanced(Mask.causal(), 24, 4, (0, 5, 24), block=2)
TURNS: list[tuple[Any, Any]] = [
    (None, "contiguous"),
    (None, "striped"),
    ("contiguous", "zigzag"),
    (Striped(), "block_cyclic:2"),
    (None, BALANCED),
    (BALANCED, "contiguous"),
    (BALANCED, Balanced(Mask.full(), 24, 4, (0, 11, 24), block=2)),
]
"""The layout that tokens are in, and the one that they come in; the axis is zigzag."""


@on_ranks(4)
def test_tokens_come_in_the_other_order() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    SequenceAxis(mesh, "zigzag")
    whole = torch.arange(24 * 6.0).view(2, 24, 3)
    for layout, to in TURNS:
        before, after = whole[:, _positions(layout)], whole[:, _positions(to)]
        for dim, view in ((1, lambda x: x), (-1, lambda x: x.mT), (0, lambda x: x[0, :, 0])):
            local = view(before).detach().requires_grad_()
            result = relayout(local, mesh, dim, to, layout=layout)
            assert torch.equal(result, view(after))
            # The gradient of a token comes back to where the token was.
            (grad,) = torch.autograd.grad(result.square().sum(), local)
            assert torch.equal(grad, 2 * local)
    _dtensors(mesh, whole)
    compiled = torch.compile(relayout, backend="aot_eager", fullgraph=True)
    local = whole[:, _positions(None)]
    assert torch.equal(compiled(local, mesh, 1), whole[:, _positions("contiguous")])
    tokens = torch.arange(19)[as_layout("zigzag").positions(dist.get_rank(), 4, 19)]
    in_order = relayout(tokens, mesh, 0, seq_len=19)
    assert in_order.tolist() == as_layout("contiguous").positions(dist.get_rank(), 4, 19)
    assert relayout(tokens, mesh, 0, "zigzag", seq_len=19) is tokens


def _positions(layout: Any) -> list[int]:
    found: Layout = as_layout("zigzag" if layout is None else layout)
    return found.positions(dist.get_rank(), 4, 24)


def _dtensors(mesh: Any, whole: Tensor) -> None:
    """Lengths that do not divide, and a mesh of two axes."""
    sharded = shard_sequence(whole[:, :19], mesh, 1).requires_grad_()
    in_order = relayout(sharded, mesh, 1)
    assert in_order.placements == (Shard(1),)
    assert torch.equal(in_order.full_tensor(), whole[:, :19])
    in_order.square().sum().backward()
    assert torch.equal(sharded.grad.to_local(), 2 * sharded.to_local())
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    SequenceAxis(both["cp"], "zigzag")
    order = [x for rank in range(2) for x in as_layout("zigzag").positions(rank, 2, 24)]
    local = whole.chunk(2)[both.get_local_rank(0)][:, order].chunk(2, 1)[both.get_local_rank(1)]
    two = DTensor.from_local(local, both, [Shard(0), Shard(1)])
    assert torch.equal(relayout(two, both["cp"], 1).full_tensor(), whole)


@on_ranks(4)
def test_exchange() -> None:
    mesh, rank = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), dist.get_rank()
    SequenceAxis(mesh, "zigzag")
    whole = [torch.randn(2, heads, 24, 3) for heads in (8, 2)]
    dist.broadcast(whole[0], 0), dist.broadcast(whole[1], 0)
    query, key = (x[:, :, _positions(None)] for x in whole)
    for attend in (exchange, torch.compile(exchange, backend="aot_eager", fullgraph=True)):
        all_query, all_key = attend([query, key], mesh)
        assert torch.equal(all_query, whole[0][:, 2 * rank : 2 * rank + 2])
        assert torch.equal(all_key, whole[1][:, rank // 2 : rank // 2 + 1])
        (back,) = attend([all_query], mesh, to="tokens", num_key_heads=2)
        assert torch.equal(back, query)
    # Two groups, and heads that do not divide: 3 of 5 on the second rank of a group.
    odd = query[:, :5].detach().requires_grad_()
    (exchanged,) = exchange([odd], mesh, heads=2)
    assert exchanged.shape == (2, (2, 3)[rank % 2], 12, 3)
    (back,) = exchange([exchanged], mesh, to="tokens", heads=2, num_heads=[5])
    assert torch.equal(back, odd)
    (grad,) = torch.autograd.grad(back.square().sum(), odd)
    assert torch.equal(grad, 2 * odd)


WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "copies": (ValueError, "copied to several ranks cannot come back", lambda x, mesh: exchange(
        [x[:, :1].repeat(1, 4, 1, 1), x[:, :1]], mesh, to="tokens",
        num_heads=[4, 1], num_key_heads=1)),
    "too few heads": (ValueError, "each has to get a head", lambda x, mesh: exchange(
        [x, x[:, :1]], mesh)),
    "groups": (ValueError, r"divides the 4 of the axis, got 3", lambda x, mesh: exchange(
        [x.repeat(1, 3, 1, 1)], mesh, heads=3)),
    "a DTensor": (TypeError, r"local shards, got a DTensor; use .to_local\(\)",
        lambda x, mesh: exchange([DTensor.from_local(x, mesh, [Shard(2)])], mesh)),
    "no list": (TypeError, "must be a list of tensors", lambda x, mesh: exchange(x, mesh)),
    "where to": (ValueError, '"heads" or "tokens", got \'x\'', lambda x, mesh: exchange(
        [x], mesh, to="x")),
    "layout": (ValueError, "to must be a layout: unknown layout 'spiral'", lambda x, mesh: relayout(
        x, mesh, 2, "spiral")),
    "length": (ValueError, "length that is a multiple of the 4 ranks", lambda x, mesh: relayout(
        x, mesh, 2, "striped", seq_len=15)),
    "lengths": (ValueError, r"tokens \(seq_len 12\), got a tensor", lambda x, mesh: relayout(
        x, mesh, 2, "striped", seq_len=12)),
    "a batch's": (ValueError, "must be the Balanced layout of this one", lambda x, mesh: relayout(
        x, mesh, 2, "balanced")),
    "another batch's": (ValueError, "shard the 16 tokens over 4 ranks", lambda x, mesh: relayout(
        x, mesh, 2, BALANCED)),
    "dim": (IndexError, "dim must be from -4 to 3", lambda x, mesh: relayout(x, mesh, 4)),
    "placements": (ValueError, r"must be Shard\(1\) over the axis", lambda x, mesh: relayout(
        DTensor.from_local(x, mesh, [Shard(2)]), mesh, 1)),
}  # fmt: skip


@on_ranks(4)
def test_bad_input() -> None:
    """Rank 0 alone calls: nothing is sent before it is refused."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    x = torch.zeros(1, 2, 4, 3)
    for error, match, call in WRONG.values():
        with pytest.raises(error, match=match):
            call(x, mesh)
