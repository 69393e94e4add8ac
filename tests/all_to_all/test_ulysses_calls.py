"""All ways to exchange tokens for heads, and what each of them sends and keeps."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from dtensor_ring import (
    ContextParallel,
    Mask,
    SequenceAxis,
    compare_strategies,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from dtensor_ring.all_to_all import ulysses as ulysses_module
from dtensor_ring.all_to_all.ulysses import RingTensors
from tests.dense import dense_attention, largest
from tests.lab.counted import counted
from tests.pool import Pool, on_ranks


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_all_ways_to_call_it() -> None:
    """Local shards, DTensors, SDPA on DTensors and a module: out, lse and gradients."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    SequenceAxis(mesh, "zigzag", strategy=f"ulysses:{max(2, size // 2)}")
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, 16, 4) for heads in (8, 4, 4)]
    sinks, grad = torch.randn(8), torch.randn(2, 8, 16, 4)
    found: dict[str, float] = {}
    for way, (attend, sinks_of) in WAYS.items():
        dense = dense_attention(*whole, Mask.causal(), sinks=sinks if sinks_of else None)
        expected = [dense.out, dense.lse, *dense.backward(grad)]
        inputs = [shard_sequence(x, mesh, 2).requires_grad_() for x in whole]
        own_sinks = sinks_of(sinks, mesh).requires_grad_() if sinks_of else None
        out, *lse = attend(*inputs, own_sinks, mesh)
        used = [*inputs, *([own_sinks] if sinks_of else [])]
        grads = torch.autograd.grad(out, used, shard_sequence(grad, mesh, 2))
        results = [out, *(lse or [None]), *grads[:3]]
        pairs = [
            (unshard_sequence(x, 2), y)
            for x, y in zip(results, expected, strict=False)
            if x is not None
        ]
        if sinks_of:
            total = grads[3].full_tensor() if isinstance(grads[3], DTensor) else grads[3]
            if not isinstance(grads[3], DTensor):
                dist.all_reduce(total)
            pairs.append((total, expected[-1]))
        for number, (x, y) in enumerate(pairs):
            found[f"{way} {number}"] = (x - y).abs().max().item()
    assert largest(found.values()) < 1e-5, found


def _local_shards(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    shards = [x.to_local() for x in (query, key, value)]
    results = ring_attention(*shards, sinks=sinks, mesh=mesh, return_lse=True)
    return [DTensor.from_local(x, mesh, [Shard(2)]) for x in results]


def _dtensors(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> Any:
    return ring_attention(query, key, value, sinks=sinks, return_lse=True)


def _sdpa(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    return [F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)]


def _out_only(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    return [ring_attention(query, key, value, strategy="ulysses")]


def _offloaded(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    """What autograd saves is a copy, which holds nothing else."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        return _sdpa(query, key, value, sinks, mesh)


def _checkpointed(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    """What autograd saves is made again, exchanges included."""
    return checkpoint(_sdpa, query, key, value, sinks, mesh, use_reentrant=False)


def _as_the_axis_says(
    query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh
) -> list[Tensor]:
    return [ring_attention(query, key, value)]


class _Attention(nn.Module):
    def forward(self, query: Any, key: Any, value: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _module(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    style = ContextParallel("zigzag", strategy="ulysses:2")
    attention = parallelize_module(_Attention(), mesh, style)
    out = attention(*(x.to_local() for x in (query, key, value)))
    return [DTensor.from_local(out, mesh, [Shard(2)])]


WAYS: dict[str, Any] = {
    "local shards": (_local_shards, lambda sinks, mesh: sinks.clone()),
    "dtensors": (_dtensors, lambda sinks, mesh: distribute_tensor(sinks, mesh, [Replicate()])),
    "sdpa": (_sdpa, None),
    "offloaded": (_offloaded, None),
    "checkpointed": (_checkpointed, None),
    "out only": (_out_only, None),
    "module": (_module, None),
}


SENDERS: dict[str, tuple[Any, bool]] = {
    "dtensors": (_as_the_axis_says, False),
    "with lse": (_dtensors, True),
    "sdpa": (_sdpa, True),
    "compiled dtensors": (_as_the_axis_says, True),
    "compiled sdpa": (_sdpa, True),
}
"""How to call it, and whether the ranks exchange lse, too."""


@pytest.mark.parametrize(
    ("strategy", "ways"),
    [("ulysses", list(SENDERS)), ("ulysses:2", [x for x in SENDERS if "compiled" not in x])],
)
def test_every_way_sends_what_is_said(pool: Pool, strategy: str, ways: list[str]) -> None:
    """To the byte, forward and backward: nothing is exchanged a second time for backward."""
    batch, (heads, key_heads), seq_len, dim = 2, (8, 4), 16, 4
    world_size = 2 if strategy == "ulysses" else 4
    said = compare_strategies(
        *(Mask.causal(), seq_len, world_size, (heads, key_heads), dim),
        batch=batch,
        dtype=torch.float32,
        strategies=[strategy],
    ).rows[0]
    shapes = [(batch, count, seq_len, dim) for count in (heads, key_heads, key_heads)]
    by_rank = pool.run(world_size, _sent, strategy, ways, shapes)
    for way in ways:
        # Of half of the heads, the tokens of the other rank of the group.
        of_lse = batch * heads // 2 * seq_len // world_size * 4 if SENDERS[way][1] else 0
        busiest = [max(x) for x in zip(*(found[way] for found in by_rank), strict=True)]
        assert busiest == [said.forward.sent + of_lse, said.backward.sent], way


@on_ranks(2)
def test_what_was_exchanged_lives_as_long_as_lse() -> None:
    """Not longer, with and without a backward; and only where there will be one."""
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "zigzag", strategy="ulysses")
    inputs = [shard_sequence(torch.randn(1, 2, 8, 4), mesh, 2) for _ in range(3)]
    made: list[ref[Tensor]] = []
    exchanged = ulysses_module.RingTensors

    def seen(*tensors: Tensor) -> RingTensors:
        made.extend(ref(x) for x in tensors if x is not None)
        return exchanged(*tensors)

    with patch.object(ulysses_module, "RingTensors", seen):
        for needs_grad, goes_back in ((False, False), (True, False), (True, True)):
            for x in inputs:
                x.requires_grad_(needs_grad)
            out = F.scaled_dot_product_attention(*inputs, is_causal=True)
            assert len(made) == 5
            assert all((x() is not None) == needs_grad for x in made)
            if goes_back:
                torch.autograd.grad(out, inputs, out.detach())
            del out
            assert all(x() is None for x in made)
            made.clear()


def _sent(strategy: str, ways: list[str], shapes: list[tuple[int, ...]]) -> dict[str, list[int]]:
    """By way, the bytes that this rank sends forward and backward."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    SequenceAxis(mesh, "zigzag", strategy=strategy)
    for way in ways:
        attend, _ = SENDERS[way]
        if way.startswith("compiled"):
            attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
        inputs = [shard_sequence(torch.randn(x), mesh, 2).requires_grad_() for x in shapes]
        (out, *_), forward = counted(lambda: attend(*inputs, None, mesh))  # noqa: B023
        _, back = counted(lambda: torch.autograd.grad(out, inputs, out.detach()))  # noqa: B023
        found[way] = [forward.sent, back.sent]
    return found


@on_ranks(4)
def test_too_few_heads_are_refused() -> None:
    """On all ranks, before anything is sent; heads that another axis shards do not count."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    SequenceAxis(mesh["cp"], "zigzag", strategy="ulysses")
    for num_heads, num_key_heads in ((0, 0), (4, 0), (4, 3)):
        query, key = torch.randn(1, num_heads, 4, 8), torch.randn(1, num_key_heads, 4, 8)
        with pytest.raises(ValueError, match=r"need heads|must be a multiple of the key heads"):
            ring_attention(query, key, key, mesh=mesh["cp"])
    match = "the strategy 'ulysses:2' cannot run this attention: 1 query heads cannot be sharded"
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=match):
        ring_attention(x, x, x, mesh=mesh["cp"])
    query = distribute_tensor(torch.randn(1, 2, 8, 8), mesh, [Shard(1), Shard(2)])
    for attend in (ring_attention, F.scaled_dot_product_attention):
        with pytest.raises(ValueError, match=match):
            attend(query, query, query)
