"""The strategy "auto": what it takes, that it is exact, and what it costs a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_ring import Mask, SequenceAxis, ring_attention
from dtensor_ring.ops import ring_op
from tests.dense import dense_attention
from tests.forced import machine_for
from tests.graphs import capturing
from tests.meshes import random_inputs
from tests.pool import Pool

SEQ_LEN = 32
SPECS = {"ring": "ring", "all_gather": "all_gather", "ulysses": "ulysses:{}"}
DOCUMENTS = torch.tensor([0, 7, 9, 22], dtype=torch.int32)


@contextmanager
def taken() -> Iterator[list[str]]:
    """The strategies of the calls of the ring op, with the machines in their records."""
    found: list[str] = []

    def checked(call: Any, *rest: Any) -> Any:
        found.append(f"{call.place.strategy} by {call.place.machine}")
        return checked_call(call, *rest)

    checked_call = ring_op.checked_call
    with patch.object(ring_op, "checked_call", checked):
        yield found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("fastest", SPECS)
def test_dense_result(pool: Pool, fastest: str, world_size: int) -> None:
    pool.run(world_size, _check_dense, fastest, SPECS[fastest].format(world_size))


def _check_dense(fastest: str, expected: str) -> None:
    """On shards, on DTensors and by SDPA, forward and backward."""
    mesh, machine = init_device_mesh("cpu", (dist.get_world_size(),)), machine_for(fastest)
    axis = SequenceAxis(mesh, strategy="auto", machine=machine)
    with taken() as found:
        _check_axis(axis)
    assert {*found} == {f"{expected} by {machine.label}"}
    assert axis.strategy == "auto"


def _check_axis(axis: SequenceAxis) -> None:
    inputs = random_inputs(seq_len=SEQ_LEN)
    mine = axis.positions(SEQ_LEN)
    packed: dict[str, Any] = {"mask": Mask.sliding(5), "cu_seqlens": DOCUMENTS}
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
    for fastest, nodes in (("ring", ["ring_attention"]), ("ulysses", EXCHANGED)):
        backward = [x.replace("attention", "attention_backward") for x in nodes]
        for graphs in pool.run(2, _compiled, fastest):
            assert graphs == [nodes, backward] * 2


EXCHANGED = ["exchange", "ring_attention", "exchange"]


def _compiled(fastest: str) -> list[list[str]]:
    """Our ops in each graph that was compiled: of local shards, then of DTensors."""
    graphs: list[list[str]] = []
    attend = torch.compile(ring_attention, backend=capturing(graphs), fullgraph=True)
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, machine=machine_for(fastest))
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
            assert {*found} == {f"{SPECS[fastest].format(2)} by {machine_for(fastest).label}"}
    return graphs


def test_a_graph_for_all_lengths(pool: Pool) -> None:
    """Symbolic lengths have the choice of those that were traced."""
    for graphs in pool.run(2, _dynamic):
        assert graphs == [EXCHANGED]


def _dynamic() -> list[list[str]]:
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
    return graphs
