"""What a CUDA graph cannot capture says so: what, why, and what to do first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring.compute.capture import is_capturing, keep_captured, refuse_capture
from dtensor_ring.compute.memory import Numbers
from dtensor_ring.dtensor.flex.block_mask import MaskBlocks
from dtensor_ring.ops.boundaries import documents_of, run_table, slices_of_table, starts_of
from dtensor_ring.transport.symmetric import SymmetricTransport
from dtensor_ring.transport.transport import ProcessGroupTransport
from parallel_plans.huggingface.core.documents import find_documents
from tests.test_public import ROOT

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
