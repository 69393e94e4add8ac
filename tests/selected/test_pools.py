"""Pools of a sharded sequence are those of one process, in both directions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_ring import Balanced, Mask
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.selected.plan import pool_table
from dtensor_ring.selected.pools import pool_tokens
from tests.decode.test_decode_messages import Counted
from tests.layouts import LAYOUTS
from tests.pool import Pool, on_ranks

DIM = 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_pools_are_where_their_last_token_is(layout: Layout) -> None:
    for world_size, length, size in product((1, 2, 3, 4), (1, 5, 24, 37), (1, 2, 3, 4, 50)):
        seq_len = layout.dealt_length(length, world_size)
        owner = {p: r for r in range(world_size) for p in layout.positions(r, world_size, seq_len)}
        table = pool_table(layout, world_size, seq_len, size)
        for rank in range(world_size):
            for position in table.positions(rank, world_size, seq_len):
                last = min(position // size * size + size, seq_len) - 1
                assert owner.pop(position, None) is not None, "each is on one rank"
                assert layout_owner(layout, world_size, seq_len, last) == rank
        assert not owner


def layout_owner(layout: Layout, world_size: int, seq_len: int, position: int) -> int:
    found = [r for r in range(world_size) if position in layout.positions(r, world_size, seq_len)]
    return found[0]


def dense(x: Tensor, gates: Tensor | None, size: int) -> Tensor:
    """Of the whole sequence `(B, S, D)`."""
    pools = []
    for begin in range(0, x.shape[1] - size + 1, size):
        tokens = x[:, begin : begin + size]
        weights = torch.ones_like(tokens) if gates is None else gates[:, begin : begin + size].exp()
        pools.append((tokens * weights).sum(1) / weights.sum(1).expand_as(tokens[:, 0]))
    return torch.stack(pools, 1) if pools else x[:, :0]


CASES = [
    (2, "contiguous", 23, 4, 0),
    (3, "zigzag", 37, 5, DIM),
    (3, "striped", 24, 4, 1),
    (4, "block_cyclic:3", 41, 2, DIM),
    (2, "balanced", 24, 5, 1),
    (4, "contiguous", 24, 9, 0),  # of some ranks no token is the last of a pool
    (2, "zigzag", 6, 7, 0),  # no pool at all
    (1, "zigzag", 10, 3, DIM),
    (2, "zigzag", 20, 1, 0),
]


@pytest.mark.parametrize(("world_size", "spec", "length", "size", "gate_dim"), CASES)
@on_ranks()
def test_equals_one_process(spec: str, length: int, size: int, gate_dim: int) -> None:
    """Results and gradients, with the loss of all ranks together."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world_size,))
    if spec == "balanced":
        layout: Layout = Balanced(Mask.causal(), length, world_size, (0, 5, length), block=2)
    else:
        layout = as_layout(spec)
        length = layout.dealt_length(length, world_size)
    generator = torch.Generator().manual_seed(length + size)
    shapes = [(2, length, DIM)] + [(2, length, gate_dim)] * bool(gate_dim)
    whole = [torch.randn(*x, generator=generator).double().requires_grad_() for x in shapes]
    mine = layout.positions(rank, world_size, length)
    local = [x.detach()[:, mine].requires_grad_() for x in whole]
    both, owned = [*whole, None][:2], [*local, None][:2]
    found = pool_tokens(owned[0], mesh, size, layout=layout, gates=owned[1], seq_len=length)
    expected = dense(both[0], both[1], size)
    ends = [p for p in range(size - 1, length, size) if p in mine]
    numbers = [p // size for p in ends]
    torch.testing.assert_close(found, expected[:, numbers], rtol=1e-12, atol=1e-12)
    # A factor for each pool tells gradients that go to the wrong token.
    factor = torch.arange(1.0, expected.shape[1] + 1).double().view(1, -1, 1)
    wanted = torch.autograd.grad((expected * factor).square().sum(), whole)
    grads = torch.autograd.grad((found * factor[:, numbers]).square().sum(), local)
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours, theirs[:, mine], rtol=1e-12, atol=1e-12)


def in_16_bits() -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (1,))
    both = torch.randn(2, 1, 64, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    x, gates = both.unbind()
    expected = dense(x.double(), gates.double(), 32).bfloat16()
    return pool_tokens(x, mesh, 32, layout="zigzag", gates=gates), expected


def test_16_bits_are_rounded_once(pool: Pool) -> None:
    ((found, expected),) = pool.run(1, in_16_bits)
    assert torch.equal(found, expected)


@on_ranks(2)
def test_shards_of_whole_pools_send_nothing() -> None:
    mesh = init_device_mesh("cpu", (2,))
    counts = []
    for size in (4, 5):
        with Counted() as counted:
            pool_tokens(torch.ones(1, 16, DIM), mesh, size, layout="zigzag")
        counts.append(counted.others)
    whole, cut = counts
    assert whole == 0
    assert cut > 0


@on_ranks(1)
def test_wrong_calls() -> None:
    mesh = init_device_mesh("cpu", (1,))
    x: Any = torch.ones(1, 6, DIM)
    for error, match, given, how in (
        (TypeError, "plain local shard, got DTensor", DTensor.from_local(x, mesh), {}),
        (TypeError, "tensor must be a plain local shard, got int", 3, {}),
        (ValueError, r"\(B, L, D\), got torch.float32 \(6, 3\)", x[0], {}),
        (ValueError, "gates must be .* got .*float64", x, {"gates": x.double()}),
        (ValueError, r"gates must be .* got \(1, 6, 2\)", x, {"gates": x[..., :2]}),
        (ValueError, "size must be", x, {"size": 0}),
        (ValueError, "unknown layout", x, {"layout": "spiral"}),
    ):
        with pytest.raises(error, match=match):
            pool_tokens(given, mesh, **{"size": 2, "layout": "zigzag"} | how)
