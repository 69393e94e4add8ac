"""The strategy "auto": what it takes, by which machine, that it is exact, and what it costs."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_ring import ContextParallel, Mask, SequenceAxis, Slices, ring_attention
from dtensor_ring.dtensor import axis as sequence_axis
from dtensor_ring.dtensor import choice
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


# The machine of an axis: one rank reads its file for all, and all hear of it if it cannot.

RING = machine_for("ring")


def test_the_first_rank_reads_for_all(pool: Pool, tmp_path: Path) -> None:
    """Once; the other ranks of each ring have no such file."""
    path = tmp_path / "machine.json"
    path.write_text(RING.to_json())
    assert pool.run(4, _read, str(path)) == [1, 1, 0, 0]


def _read(path: str) -> int:
    """How often this rank reads a file."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))["cp"]
    name = path if mesh.get_local_rank() == 0 else f"{path}.missing"
    with patch.object(sequence_axis, "read_machine", wraps=sequence_axis.read_machine) as reads:
        axes = [SequenceAxis(mesh, strategy="auto", machine=name) for _ in range(2)]
    assert [axis.machine for axis in axes] == [RING] * 2
    return reads.call_count


BROKEN = {
    "missing": (None, r"neither a file that can be read .* nor one of"),
    "no JSON": ("{", r"machine file .* is not JSON"),
    "another schema": ('{"schema": 99}', r"has schema 99, this version reads"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_of_all_ranks(pool: Pool, name: str, tmp_path: Path) -> None:
    text, error = BROKEN[name]
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    pool.run(2, _check_broken, str(path), rf"rank 0, which reads the machine.*{error}")


def _check_broken(path: str, error: str) -> None:
    """The axis is as before, so it can be configured again, and its group is of use."""
    mesh = init_device_mesh("cpu", (2,))
    for _ in range(2):
        with pytest.raises(ValueError, match=error):
            SequenceAxis(mesh, strategy="auto", machine=path)
    axis = SequenceAxis(mesh, strategy="auto", machine=RING)
    query, key, value, _ = random_inputs()
    assert axis.attention(query, key, value).shape == query.shape


def test_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Types, other machines, and the file of another device than this GPU."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh, wrong = init_device_mesh("cpu", (2,)), "machine must be a Machine, a name"
        for make in (
            lambda machine: SequenceAxis(mesh, machine=machine),
            lambda machine: ContextParallel(machine=machine),
        ):
            given: Any = 3
            with pytest.raises(TypeError, match=wrong):
                make(given)
        path = tmp_path / "machine.json"
        path.write_text(replace(RING, device="NVIDIA H100").to_json())
        group = mesh.get_group()
        assert sequence_axis.shared_machine(group, path).device == "NVIDIA H100"  # a dry run
        monkeypatch.setattr(sequence_axis, "device_name", lambda _: "NVIDIA A100")
        with pytest.raises(ValueError, match="is of NVIDIA H100, not of NVIDIA A100"):
            sequence_axis.shared_machine(group, f"{path.parent}/./machine.json", "cuda")
        axis = SequenceAxis(mesh, strategy="auto", machine=RING)
        assert pickle.loads(pickle.dumps(axis.__reduce__()[0])).keywords["machine"] == RING
        with pytest.raises(ValueError, match="chosen by the heads of a call"):
            axis.prepare(16)
    finally:
        dist.destroy_process_group()


def test_the_data_sheet_of_a_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its name, else that of the default; it is said once, by the first rank of an axis."""
    sheets = {name: replace(RING, name=name) for name in ("a100", "h100")}
    for module in (choice, sequence_axis):
        monkeypatch.setattr(module, "preset_names", sheets.keys)
        monkeypatch.setattr(module, "read_machine", sheets.__getitem__)
    assert choice.data_sheet_of("cpu").name == "h100"
    monkeypatch.setattr(choice, "device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    assert choice.data_sheet_of("cuda").name == "a100"
    caplog.set_level(logging.WARNING, "dtensor_ring")
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh, x = init_device_mesh("cpu", (2,)), torch.randn(1, 2, 8, 4)
        for _ in range(2):
            ring_attention(x, x, x, mesh=mesh, strategy="auto")
        dist.destroy_process_group()
    (record,) = caplog.records
    assert "goes by the data sheet of a100" in record.getMessage()
