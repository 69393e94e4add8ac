"""What is kept of a call, what it returns, and how long both live."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dtensor_ring import (
    Mask,
    SequenceAxis,
    decode_attention,
    exchange,
    merge_attention,
    relayout,
    ring_attention,
    shard_sequence,
    sum_over_sequence,
    unshard_sequence,
)
from dtensor_ring.dtensor.annotation import annotation_of, axis_group
from dtensor_ring.dtensor.known_calls import MAX_KNOWN, known_call
from dtensor_ring.planning.run_table import as_layout
from tests.dense import dense_attention
from tests.meshes import random_inputs
from tests.pool import on_ranks
from tests.rings import Ring

SHAPE = 1, 2, 24, 8
MASKS = Mask.causal(), Mask.full(), Mask.sliding(3)
ASKED = None, None, 0.0, None, None


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def _whole() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_calls_follow_the_axis() -> None:
    mesh = _mesh()
    *inputs, grad = _whole()
    for layout in ("zigzag", "striped", "contiguous", "zigzag"):
        SequenceAxis(mesh, layout)
        for mask in MASKS:
            ring = Ring(as_layout(layout), mesh.size(), SHAPE[2], mask)
            here = ring.positions(mesh.get_local_rank())
            expected = dense_attention(*inputs, mask)
            results = expected.out, expected.lse, *expected.backward(grad)
            shards = [x[:, :, here].requires_grad_() for x in inputs]
            for _ in range(2):  # new, and then known
                out, lse = ring_attention(*shards, mesh=mesh, mask=mask, return_lse=True)
                grads = torch.autograd.grad(out, shards, grad[:, :, here])
                for x, whole in zip((out, lse, *grads), results, strict=True):
                    torch.testing.assert_close(x, whole[:, :, here], rtol=1e-9, atol=1e-9)
            assert known_call(*shards, mesh, (mask, *ASKED[1:])) is not None


@on_ranks(1)
def test_wrong_arguments_are_refused_after_right_ones() -> None:
    mesh = _mesh()
    query, key, value, _ = _whole()
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception]]] = [
        ((query, key, value), {"scale": [1.0]}, TypeError),
        ((query, key, value), {"mask": [Mask.causal()]}, TypeError),
        ((query, key, value), {"kernel": "unknown"}, ValueError),
        ((query, key, value), {"strategy": "unknown"}, ValueError),
        ((query, key, value.float()), {}, ValueError),
        ((query, key[0], value), {}, ValueError),
        ((query, key.to_sparse(), value), {}, ValueError),
        ((query, None, value), {}, TypeError),
    ]
    ring_attention(query, key, value, mesh=mesh)
    for inputs, options, error in wrong:
        with pytest.raises(error):
            ring_attention(*inputs, mesh=mesh, **options)


@on_ranks(1)
def test_numbers_that_change_are_read_again() -> None:
    mesh, scale = _mesh(), torch.tensor(0.5)
    query, key, value, _ = _whole()
    last = query[:, :, -1:]
    for number in (0.5, 0.25):
        scale.fill_(number)
        for inputs, call in (((query,), ring_attention), ((last,), decode_attention)):
            found = [call(*inputs, key, value, mesh=mesh, scale=x) for x in (scale, number)]
            assert torch.equal(*found), number


@on_ranks(1)
def test_modes_see_known_calls() -> None:
    mesh = _mesh()
    inputs = [x.requires_grad_() for x in _whole()[:3]]

    def call(*given: Tensor) -> Tensor:
        return ring_attention(*given, mesh=mesh)

    expected = call(*inputs)
    with FlopCounterMode(display=False) as counter:
        call(*inputs).sum().backward()
    assert counter.get_total_flops() > 0
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call(*inputs).sum().backward()
    names = {event.name for event in profiler.events()}
    assert {f"dtensor_ring::ring_attention{x}" for x in ("", "_backward")} <= names
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*(x.float() for x in inputs)).dtype == torch.bfloat16
    stacked = [torch.stack([x, 2 * x]) for x in inputs]
    mapped: Callable[..., Tensor] = torch.vmap(call)
    torch.testing.assert_close(mapped(*stacked)[0], expected)
    with torch.device("meta"):
        assert call(*(torch.empty(SHAPE) for _ in range(3))).is_meta


@on_ranks(1)
def test_few_calls_are_kept() -> None:
    mesh = _mesh()
    calls = annotation_of(axis_group(mesh)).calls
    for length in range(1, MAX_KNOWN + 3):
        x = torch.zeros(1, 1, length, 1)
        ring_attention(x, x, x, mesh=mesh)
    assert 0 < len(calls) <= MAX_KNOWN
    SequenceAxis(mesh, "zigzag")
    assert not calls


# Outputs are ordinary tensors: they may be changed in place, as those of PyTorch's attention.

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda out: out.mul_(2),
    "moved": lambda out: out.add_(1),
    "in part": lambda out: out.select(3, 0).zero_(),
    "through a view": lambda out: out.transpose(1, 2).mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_outputs_change_in_place(change: str) -> None:
    """As those of PyTorch's attention in one process: the next backward sees that they did."""
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "zigzag")
    whole = [x.requires_grad_() for x in random_inputs(kv_heads=4)[:3]]
    shards = [shard_sequence(x.detach(), mesh, 2) for x in whole]
    placed = [x.requires_grad_() for x in shards]
    local = [x.to_local().detach().requires_grad_() for x in shards]
    for attend in (
        partial(F.scaled_dot_product_attention, *whole),
        partial(ring_attention, *local, mesh=mesh),
        partial(ring_attention, *placed),
        partial(F.scaled_dot_product_attention, *placed),
    ):
        out, same = attend(), attend().detach()
        CHANGES[change](out)
        CHANGES[change](same)
        assert torch.equal(_shard(out), _shard(same))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def _shard(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@on_ranks(1)
def test_outputs_of_no_grad_change_in_place() -> None:
    mesh, factor = init_device_mesh("cpu", (1,)), torch.ones((), requires_grad=True)
    with torch.no_grad():
        out = ring_attention(*random_inputs()[:3], mesh=mesh)
    expected = out.sum()
    out.mul_(factor).sum().backward()
    torch.testing.assert_close(factor.grad, expected)


@on_ranks(2)
def test_async_save_stages_the_tokens(tmp_path: Path) -> None:
    """What `async_save` copies of a sequence, attribute by attribute, has the content of it."""
    folder = str(tmp_path)
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(13.0)
    x = shard_sequence(whole, mesh, 0, layout="zigzag")
    dcp.async_save({"x": x}, checkpoint_id=folder).result()
    read = torch.zeros(13)
    dcp.load({"x": read}, checkpoint_id=folder)
    assert torch.equal(read, whole)


# What a call is given and returns dies with its last name: it is in no cycle of references.
#
# Else shards would take memory until the next collection, and a process group would outlive
# `destroy_process_group`: a thread of gloo that is left then may abort the process at its end.


def _merged(query: DTensor, key: DTensor, value: DTensor) -> object:
    part = ring_attention(query, key, value, return_lse=True)
    return merge_attention([part, part])


def _decoded(query: DTensor, key: DTensor, value: DTensor) -> object:
    with torch.no_grad():
        last = query.to_local()[:, :, -1:]
        return decode_attention(last, key.to_local(), value.to_local(), mesh=query.device_mesh)


WAYS: dict[str, Callable[..., object]] = {
    "ring": lambda *shards: ring_attention(*shards, return_lse=True),
    "ulysses": lambda *shards: ring_attention(*shards, strategy="ulysses"),
    "sdpa": lambda *shards: F.scaled_dot_product_attention(*shards, is_causal=True),
    "local": lambda *shards: ring_attention(
        *(x.to_local() for x in shards), mesh=shards[0].device_mesh
    ),
    "merge": _merged,
    "exchange": lambda *shards: exchange([x.to_local() for x in shards], shards[0].device_mesh),
    "relayout": lambda query, *_: relayout(query, query.device_mesh, 2, to="contiguous"),
    "unshard": lambda query, *_: unshard_sequence(query, 2),
    "sum": lambda query, *_: sum_over_sequence(query.to_local(), query.device_mesh),
    "decode": _decoded,
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_nothing_is_kept(way: str) -> None:
    """No memory of a call, forward and backward, is taken after it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    SequenceAxis(mesh, "zigzag")
    gc.collect()
    gc.disable()
    try:
        assert all(storage.expired() for storage in _storages(way, mesh))
    finally:
        gc.enable()


def _storages(way: str, mesh: DeviceMesh) -> list[StorageWeakRef]:
    """Of inputs, results and gradients, none of which has a name any more."""
    shards = [shard_sequence(torch.randn(1, 4, 16, 8), mesh, 2).requires_grad_() for _ in range(3)]
    found = [x for x in tree_leaves(WAYS[way](*shards)) if isinstance(x, Tensor)]
    if found[0].requires_grad:
        found[0].sum().backward()
    tensors = [x for x in [*shards, *found, *(x.grad for x in shards)] if x is not None]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return [StorageWeakRef(x.untyped_storage()) for x in local]
