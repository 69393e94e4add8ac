"""Calls that were made before: they follow the axis and their arguments, and modes see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from dtensor_ring import Mask, SequenceAxis, decode_attention, ring_attention
from dtensor_ring.dtensor.annotation import annotation_of, axis_group
from dtensor_ring.dtensor.known_calls import MAX_KNOWN, known_call
from dtensor_ring.planning.run_table import as_layout
from tests.dense import dense_attention
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
