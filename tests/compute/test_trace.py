"""What a profiler and a CUDA graph see of a ring's steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from dtensor_ring import ring_attention
from dtensor_ring.compute.capture import is_capturing, keep_captured, refuse_capture
from dtensor_ring.compute.memory import Numbers
from dtensor_ring.compute.trace import Label
from dtensor_ring.dtensor.flex.block_mask import MaskBlocks
from dtensor_ring.ops.boundaries import documents_of, run_table, slices_of_table, starts_of
from dtensor_ring.transport.symmetric import SymmetricTransport
from dtensor_ring.transport.transport import ProcessGroupTransport
from examples.profile_ring import write_trace
from parallel_plans.huggingface.core.documents import find_documents
from tests.pool import Pool, on_ranks
from tests.test_public import ROOT


def _labels(rank: int, world_size: int) -> set[str]:
    """Of a causal zigzag ring, in which every rank works on every source."""
    expected = set()
    for step in range(world_size):
        source = (rank - step) % world_size
        region = f"step {step}, source {source}"
        both: tuple[str, ...] = ("tile",)
        if step < world_size - 1:  # in the last step, nothing is in flight
            both += ("send", "wait") if step else ("pack", "send", "wait")
        # Nothing is summed before step 1, and no sum is in flight before step 2.
        sums = ("merge", "send sums")[: 2 * step] + ("wait for sums",)[: step // 2]
        merges = ("merge",)[: step // (world_size - 1)]
        expected |= {f"ring forward, {region}: {what}" for what in both + merges}
        expected |= {f"ring backward, {region}: {what}" for what in both + sums}
    home = f"ring backward, step {world_size - 1}, source {rank}"  # what others summed up
    return expected | {f"{home}: {what}" for what in ("wait for sums", "merge")}


def test_every_step_is_labelled(pool: Pool, tmp_path: Path) -> None:
    """In the traces of the example, which any reader of Chrome's format opens."""
    for rank, trace in enumerate(pool.run(3, _traced, tmp_path)):
        events = json.loads(trace.read_text())["traceEvents"]
        spans = [event for event in events if event.get("name", "").startswith("ring ")]
        assert {span["name"] for span in spans} == _labels(rank, 3)
        assert all(span["ph"] == "X" for span in spans), "they have a beginning and an end"
        firsts = [span for span in spans if span["name"].endswith("step 0, source 0: send")]
        assert len(firsts) == (4 if rank == 0 else 0), "two steps, forward and backward"


def _traced(folder: Path) -> Path:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return write_trace(mesh, 48, folder)


@on_ranks(1)
def test_a_compiled_call_has_the_same_labels() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    found = []
    for call in (ring_attention, torch.compile(ring_attention, backend="aot_eager")):
        call(x, x, x, mesh=mesh).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            call(x, x, x, mesh=mesh).sum().backward()
        found.append({event.name for event in profiler.events() if event.name.startswith("ring ")})
    # A ring of one rank is one launch: nothing is merged or waited for.
    of_one = {f"ring {ring}, step 0, source 0: tile" for ring in ("forward", "backward")}
    assert found == [of_one] * 2


@on_ranks(1)
def test_nothing_is_recorded_without_a_profiler() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    with patch("torch.autograd.profiler.record_function", side_effect=AssertionError):
        ring_attention(x, x, x, mesh=mesh).sum().backward()
    assert Label("forward", 0, 0)("tile") is Label("backward", 1, 2)("merge")


# What a CUDA graph cannot capture says so: what, why, and what to do first.

CUDA = torch.device("cuda")
ONCE, ON_CPU = "run the same attention, with its backward, once before", "pass them on the CPU"
OF_HOST = "pass cu_seq_lens_q on the CPU"


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=CUDA)


def connect() -> None:
    backend = SimpleNamespace(name=lambda: "nccl")
    group: Any = type("Group", (), {"_get_backend": lambda self, device: backend})()
    ProcessGroupTransport(group).prepare(CUDA)


def share_memory() -> None:
    transport: Any = SymmetricTransport.__new__(SymmetricTransport)
    transport._size, transport._outboxes = 2, {}
    transport.prepare(CUDA)


def read_blocks() -> None:
    counts, indices = integers(1, 1, 2), integers(1, 1, 2, 2)
    MaskBlocks((4, 4), counts, indices, None, None, (2, 2), lambda *_: counts).on_host()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "cu_seqlens on the GPU": (lambda: documents_of(integers(3), "cu_seqlens", 1), ON_CPU),
    "runs on the GPU": (lambda: run_table(integers(2, 1, 2)), ON_CPU),
    "slices on the GPU": (lambda: slices_of_table(integers(1, 6), 1), ON_CPU),
    "query_starts on the GPU": (lambda: starts_of(integers(1), 1), ON_CPU),
    "boundaries that are not there": (lambda: Numbers(torch.int32, (0, 3)).on(CUDA), ONCE),
    "ranks that are not connected": (connect, ONCE),
    "ranks that share no memory": (share_memory, ONCE),
    "a block mask": (read_blocks, "by slices_of_block_mask, and pass them to ring_attention"),
    "position_ids": (lambda: find_documents(4, set(), position_ids=integers(1, 4)), OF_HOST),
    "attention_mask": (lambda: find_documents(4, set(), attention_mask=integers(1, 4)), OF_HOST),
    "cu_seq_lens_q": (lambda: find_documents(4, set(), cu_seq_lens_q=integers(2)), OF_HOST),
}


@pytest.mark.skipif(torch.version.cuda is None, reason="builds for CPUs make no fake CUDA tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_have_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, instead = REFUSED[name]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(
        "parallel_plans.huggingface.core.documents.has_content", lambda *tensors: True
    )
    with FakeTensorMode(), pytest.raises(RuntimeError, match=f"^a CUDA graph .*; .*{instead}"):
        run()


def test_tensors_of_the_cpu_are_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of another library may be captured meanwhile."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cpu = torch.device("cpu")
    assert not is_capturing(cpu)
    assert not keep_captured(cpu, ["nothing"])
    refuse_capture(cpu, "a reason", "another way")
    assert documents_of(torch.tensor([0, 3]), "cu_seqlens", 1).rows == ((0, 3),)


def test_one_place_asks() -> None:
    """A reason that another file would give has no way to say what to do instead."""
    files = (path for top in ("dtensor_ring", "parallel_plans") for path in (ROOT / top).rglob("*"))
    asking = [x.name for x in files if x.suffix == ".py" and "stream_capturing" in x.read_text()]
    assert asking == ["capture.py"]
