"""The strategy "auto": what it takes, that it is exact, and what it costs a compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_ring import Mask, SequenceAxis, Slices, ring_attention
from dtensor_ring.lab.machine import Curve
from tests.dense import dense_attention
from tests.forced import FAST, links, machine_by_bytes, machine_for, taken
from tests.graphs import capturing
from tests.meshes import random_inputs
from tests.pool import Pool, on_ranks

SEQ_LEN = 32
DOCUMENTS = torch.tensor([0, 3, 31], dtype=torch.int32)


FORCED = [
    (2, "ring", "ring"),
    (2, "ulysses", "ulysses:2"),
    (4, "ring", "ring"),
    (4, "all_gather", "all_gather"),
    (4, "ulysses", "ulysses:4"),
    (4, "groups", "ulysses:2"),
]


@pytest.mark.parametrize(("world_size", "fastest", "expected"), FORCED)
@on_ranks()
def test_dense_result(fastest: str, expected: str) -> None:
    """On shards, on DTensors and by SDPA, forward and backward."""
    mesh, machine = init_device_mesh("cpu", (dist.get_world_size(),)), machine_for(fastest)
    axis = SequenceAxis(mesh, strategy="auto", machine=machine)
    with taken() as found:
        _check_axis(axis)
    assert {x[1:] for x in found} == {(expected, machine.label)}
    assert axis.strategy == "auto"


def _check_axis(axis: SequenceAxis) -> None:
    inputs = random_inputs(seq_len=SEQ_LEN)
    mine = axis.positions(SEQ_LEN)
    packed: dict[str, Any] = {"mask": Mask.sliding(20), "cu_seqlens": DOCUMENTS}
    causal: dict[str, Any] = {"mask": Mask.causal()}
    for options, attend in ((packed, axis.attention), (packed, ring_attention), (causal, _stock)):
        dense = dense_attention(*inputs[:3], **options)
        expected = dense.out, *dense.backward(inputs[3])
        given = [axis.shard(x, 2).requires_grad_() for x in inputs[:3]]
        _check(attend(*given, **options), given, inputs[3], expected, mine)
        local = [x[:, :, mine].clone().requires_grad_() for x in inputs[:3]]
        _check(axis.attention(*local, **options), local, inputs[3], expected, mine)


def _stock(*inputs: Tensor, mask: Mask) -> Tensor:
    assert mask == Mask.causal()
    return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)


def _check(out: Tensor, given: list[Any], grad: Tensor, expected: Any, mine: Tensor) -> None:
    out = out.to_local() if isinstance(out, DTensor) else out
    grads = torch.autograd.grad(out, given, grad[:, :, mine])
    for actual, whole in zip((out, *grads), expected, strict=True):
        actual = actual.to_local() if isinstance(actual, DTensor) else actual
        torch.testing.assert_close(actual.double(), whole[:, :, mine], atol=2e-5, rtol=0)


def test_compiled(pool: Pool) -> None:
    """One node for an attention and one for each exchange, and documents compile nothing again."""
    for fastest, nodes in (("ring", ["ring_attention"]), ("ulysses:2", EXCHANGED)):
        backward = [x.replace("attention", "attention_backward") for x in nodes]
        for graphs in pool.run(2, _compiled, fastest):
            assert graphs == [nodes, backward] * 2


EXCHANGED = ["exchange", "ring_attention", "exchange"]


def _compiled(spec: str) -> list[list[str]]:
    """Our ops in each graph that was compiled: of local shards, then of DTensors."""
    graphs: list[list[str]] = []
    attend = torch.compile(ring_attention, backend=capturing(graphs), fullgraph=True)
    mesh = init_device_mesh("cpu", (2,))
    machine = machine_for(spec.partition(":")[0])
    axis = SequenceAxis(mesh, machine=machine)
    inputs = random_inputs(seq_len=SEQ_LEN)
    mine = axis.positions(SEQ_LEN)
    for is_local in (True, False):
        for end in (6, 10, 29):
            bounds = torch.tensor([0, end, SEQ_LEN], dtype=torch.int32)
            dense = dense_attention(*inputs[:3], Mask.causal(), cu_seqlens=bounds)
            expected = dense.out, *dense.backward(inputs[3])
            if is_local:
                given: list[Any] = [x[:, :, mine].clone() for x in inputs[:3]]
            else:
                given = [axis.shard(x, 2) for x in inputs[:3]]
            given = [x.requires_grad_() for x in given]
            options: dict[str, Any] = {"mesh": mesh} if is_local else {}
            with taken() as found:
                out = attend(*given, cu_seqlens=bounds, strategy="auto", **options)
                _check(out, given, inputs[3], expected, mine)
            assert {x[1:] for x in found} == {(spec, machine.label)}
    return graphs


@on_ranks(4)
def test_each_mask_and_shape_has_its_own() -> None:
    """Per call, on an axis with another strategy: windows, documents and slices that hide much."""
    mesh = init_device_mesh("cpu", (4,))
    SequenceAxis(mesh, "contiguous", strategy="all_gather", machine=machine_by_bytes(4000.0))
    query, key, value, _ = random_inputs(seq_len=64)
    inputs = [x[:, :, :16] for x in (query, key, value)]
    band = Slices.per_query((torch.arange(64) - 3).clamp(min=0), torch.arange(64) + 1)
    short, long = torch.arange(0, 65, 4), torch.tensor([0, 60, 64])
    cases: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": {"mask": Mask.sliding(3)},
        "short documents": {"cu_seqlens": short},
        "long documents": {"cu_seqlens": long},
        "a window of slices": {"slices": band},
    }
    expected = dict.fromkeys(cases, "ring") | {"causal": "ulysses:4", "long documents": "ulysses:4"}
    with taken() as found:
        for options in cases.values():
            ring_attention(*inputs, mesh=mesh, strategy="auto", **options)
        ring_attention(*(x[:, :1] for x in inputs), mesh=mesh, strategy="auto")
    strategies = [strategy for _, strategy, _ in found]
    assert dict(zip(cases, strategies[:-1], strict=True)) == expected
    assert "ulysses" not in strategies[-1], "one head cannot be sharded over four ranks"


def test_a_named_kernel_has_its_own_speed() -> None:
    """Two of three hops hide behind a slow kernel, and then four all-to-alls take longer."""
    machine = machine_for("ring", links(Curve.line(1e3, 1e15), Curve.line(5e2, 1e15)))
    slow = [replace(x, kernel="reference") for x in machine.kernels]
    fast = [replace(x, kernel="cpu_flash", forward=FAST, backward=FAST) for x in machine.kernels]
    machine = replace(machine, kernels=(*fast, *slow))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh, x = init_device_mesh("cpu", (2,)), torch.randn(1, 2, 16, 8)
        SequenceAxis(mesh, strategy="auto", machine=machine)
        with taken() as found:
            for kernel in (None, "cpu_flash", "reference"):
                ring_attention(x, x, x, mesh=mesh, kernel=kernel)
        assert [strategy for _, strategy, _ in found] == ["ulysses:2", "ulysses:2", "ring"]
    finally:
        dist.destroy_process_group()


def test_what_is_not_simulated() -> None:
    """Nothing to compute, heads that the op refuses, new tokens, and an axis of one rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        axis = SequenceAxis(mesh, strategy="auto", machine=machine_for("ulysses"))
        query, key = torch.randn(1, 2, 0, 8), torch.randn(1, 3, 4, 8)
        with taken() as found:
            assert axis.attention(query, query, query).shape == query.shape
            with pytest.raises(ValueError, match="must be a multiple of the key heads"):
                axis.attention(torch.randn(1, 4, 4, 8), key, key)
            runs, key_runs = torch.tensor([[[6, 1]], [[7, 1]]]), torch.tensor([[[0, 4]], [[4, 4]]])
            new, kept = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 4, 8)
            axis.attention(new, kept, kept, runs=runs, key_runs=key_runs)
        assert {strategy for _, strategy, _ in found} == {"ring"}
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_a_graph_for_all_lengths() -> None:
    """Symbolic lengths have the choice of those that were traced."""
    graphs: list[list[str]] = []
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, strategy="auto", machine=machine_for("ulysses"))
    attend = torch.compile(ring_attention, backend=capturing(graphs), fullgraph=True, dynamic=True)
    for seq_len in (32, 48, 40):
        inputs = random_inputs(seq_len=seq_len)[:3]
        mine = axis.positions(seq_len)
        out = attend(*(x[:, :, mine] for x in inputs), mask=Mask.sliding(3), mesh=mesh)
        dense = dense_attention(*inputs, Mask.sliding(3)).out[:, :, mine]
        torch.testing.assert_close(out.double(), dense, atol=2e-5, rtol=0)
    assert graphs == [EXCHANGED]
