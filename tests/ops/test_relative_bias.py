"""A bias by distance: queries add it to the score of keys so many positions before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import (
    Mask,
    SequenceAxis,
    TransferPolicy,
    decode_attention,
    ring_attention,
    shard_sequence,
)
from tests.pool import on_ranks

CAUSAL, FULL = Mask.causal(), Mask.full()


def _whole(extent: int = 5, seq_len: int = 16) -> list[Tensor]:
    """Query, key, value, a bias by distance and sinks of queries, the same on each rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, seq_len, size) for heads, size in ((4, 8), (2, 8), (2, 6), (4, extent))]
    shapes += [(2, 4, seq_len)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _expected(whole: list[Tensor], mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """Out and lse, written out: a sink is a key without a value."""
    query, key, value, bias, sinks = whole
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    lag = torch.arange(query.shape[2]).unsqueeze(1) - torch.arange(key.shape[2])
    scores = query @ key.mT * scale
    for number, x in enumerate(bias.unbind(-1)):
        scores = scores + x.unsqueeze(-1) * (lag == number)
    seen = (lag >= 0) & (lag <= (len(lag) if mask.left is None else mask.left))
    scores = torch.cat([scores.masked_fill(~seen, -torch.inf), sinks.unsqueeze(-1)], -1)
    return scores.softmax(-1)[..., :-1] @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("kind", ["shards", "dtensors", "axis"])
@on_ranks(2)
def test_public_functions(kind: str, strategy: str) -> None:
    """With a sink of each query, which is not of each head."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    axis, mask = SequenceAxis(mesh, "zigzag", strategy=strategy), Mask.sliding(9)
    whole = [x.requires_grad_() for x in _whole()]
    given = [axis.shard(x, 2) for x in whole]
    how: dict[str, Any] = {"mask": mask, "scale": 0.3}
    if kind != "dtensors":
        given = [x.to_local() for x in given]
    query, key, value, bias, sinks = given
    how |= {"relative_bias": bias, "sinks": sinks}
    if kind == "axis":
        out = axis.attention(query, key, value, **how)
        expected = _expected(whole, mask, 0.3)[:1]
        found: list[Tensor] = [out]
    else:
        on = {} if kind == "dtensors" else {"mesh": mesh}
        found = [*ring_attention(query, key, value, return_lse=True, **how, **on)]
        expected = _expected(whole, mask, 0.3)
    weights = [torch.randn_like(x) for x in expected]
    dist.broadcast(weights[0], 0)
    dist.broadcast(weights[-1], 0)
    own = [axis.shard(x, 2).to_local() for x in expected]
    local = [x.to_local() if kind == "dtensors" else x for x in found]
    grads = torch.autograd.grad(
        sum((x * axis.shard(y, 2).to_local()).sum() for x, y in zip(local, weights, strict=True)),
        whole,
    )
    wanted = torch.autograd.grad(
        sum((x * y).sum() for x, y in zip(expected, weights, strict=True)), whole
    )
    for x, y in zip(local, own, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    for x, y in zip(grads, wanted, strict=True):
        dist.all_reduce(x)
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_decoding() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    axis, mask = SequenceAxis(mesh, "zigzag"), Mask.sliding(9)
    whole = _whole()
    out, lse = (x[:, :, -3:] for x in _expected(whole, mask, 0.3))
    query, bias, sinks = (whole[i][:, :, -3:] for i in (0, 3, 4))
    key, value = (axis.shard(whole[i], 2).to_local() for i in (1, 2))
    how: dict[str, Any] = {"mask": mask, "scale": 0.3, "relative_bias": bias}
    how |= {"sinks": sinks, "mesh": mesh}
    found = decode_attention(query, key, value, return_lse=True, **how)
    torch.testing.assert_close(found[0], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], lse, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"same positions in all batch rows, got query_starts \[1"):
        decode_attention(query, key, value, query_starts=torch.tensor([13, 12]), **how)


@on_ranks(1)
def test_refused() -> None:
    """Also a query that is wider by mistake."""
    mesh = init_device_mesh("cpu", (1,))
    query, key, value, bias, sinks = _whole()
    wide = torch.cat([query, bias], -1)
    for given, error, match in (
        ({"relative_bias": bias[:, :2]}, ValueError, r"\(B, N, L, E\).*got \(2, 2, 16, 5\)"),
        ({"relative_bias": bias[..., :0]}, ValueError, "needs a distance, got E = 0"),
        ({"relative_bias": bias.long()}, ValueError, "torch.int64"),
        ({"relative_bias": bias, "kernel": "cpu_flash"}, ValueError, "bias by distance"),
        ({"relative_bias": 2.0}, TypeError, "of the query's kind, got float"),
        ({"sinks": sinks[:, :, :3]}, ValueError, r"or \(B, N, L\), .*got \(2, 4, 3\)"),
    ):
        for attend in (ring_attention, decode_attention):
            few = {"query_starts": torch.zeros(1, dtype=torch.int64)}
            more = few if attend is decode_attention else {}
            with pytest.raises(error, match=match):
                attend(query, key, value, mesh=mesh, **given, **more)
    SequenceAxis(mesh)
    shards = [shard_sequence(x, mesh, 2) for x in (wide, key, value)]
    for call in (
        lambda: ring_attention(wide, key, value, mesh=mesh),
        lambda: decode_attention(wide, key, value, mesh=mesh),
        lambda: F.scaled_dot_product_attention(*shards, is_causal=True, enable_gqa=True),
    ):
        with pytest.raises(ValueError, match="one head dim"):
            call()
    axis = SequenceAxis(mesh, policy=TransferPolicy(order="fixed"))
    with pytest.raises(ValueError, match="relative_bias has no sums in a fixed order"):
        axis.attention(query, key, value, relative_bias=bias)


@on_ranks(2)
def test_compiled_in_one_graph() -> None:
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, "zigzag")
    local = [axis.shard(x, 2).to_local().requires_grad_() for x in _whole()]

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        how = {"relative_bias": bias, "sinks": sinks, "mesh": mesh}
        return ring_attention(query, key, value, **how).square()

    results = []
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = run(*local)
        results.append([out, *torch.autograd.grad(out.sum(), local)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
