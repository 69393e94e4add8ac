"""Messages between processes: on which devices, in which order."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring.transport import transport as process_group
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, set_transport, transport_of
from tests.pool import on_ranks


@on_ranks(2)
def test_gloo_sends_nothing_of_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"on CUDA and their group is gloo's, .*\"nccl\"\)"):
        ProcessGroupTransport(dist.group.WORLD).prepare(torch.device("cuda"))


@on_ranks(2)
def test_receives_go_first() -> None:
    rank, group = dist.get_rank(), Posting()
    given, got = [torch.full((2,), 10.0 * rank + i) for i in range(2)], torch.zeros(2, 2)
    transport = ProcessGroupTransport(group)
    works = transport.start([P2P(x, 1 - rank) for x in got], [P2P(x, 1 - rank) for x in given])
    for work in works:
        work.wait()
    assert got.tolist() == [[10.0 * (1 - rank) + i] * 2 for i in range(2)]
    assert not transport.start([], [])
    assert group.order == ["recv", "recv", "send", "send"]


class Posting:
    """A group that remembers the order of what it starts."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def recv(self, *message: Any) -> dist.Work:
        self.order.append("recv")
        return dist.group.WORLD.recv(*message)

    def send(self, *message: Any) -> dist.Work:
        self.order.append("send")
        return dist.group.WORLD.send(*message)


@on_ranks(2)
def test_messages_of_gpus_start_together() -> None:
    started: list[str] = []

    def start(operations: list[dist.P2POp]) -> list[dist.Work]:
        started.extend(operation.op.__name__ for operation in operations)
        return []

    peer = 1 - dist.get_rank()
    with FakeTensorMode(), patch.object(dist, "batch_isend_irecv", start):
        coming, leaving = (P2P(torch.empty(2, device="cuda"), peer) for _ in range(2))
        ProcessGroupTransport(dist.group.WORLD).start([coming], [leaving])
    assert started == ["irecv", "isend"]


@on_ranks(1)
def test_the_transport_of_a_group() -> None:
    group = dist.group.WORLD
    assert isinstance(transport_of(group), ProcessGroupTransport)
    mine = ProcessGroupTransport(group)
    set_transport(group, mine)
    assert transport_of(group) is mine


class World:
    """A group whose ranks that backend connects, after a timeout of its own."""

    def __init__(self, backend: str) -> None:
        options = SimpleNamespace(_timeout=timedelta(seconds=77))
        self._backend = SimpleNamespace(name=lambda: backend, options=options)

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        assert device.type == "cuda"
        return self._backend


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a build without NCCL")
def test_messages_of_gpus_have_a_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups that are made here, which keep the timeout of the job."""
    for backend, device, is_urgent in (
        ("nccl", "cuda", True),
        ("nccl2", "cuda", True),
        ("nccl", "cpu", False),
        ("gloo", "cuda", False),
    ):
        world = SimpleNamespace(WORLD=World(backend))
        monkeypatch.setattr(process_group.dist, "group", world)
        options = process_group.axis_group_options(device)
        assert (options is not None) == is_urgent
        if options is not None:
            assert options.is_high_priority_stream
            assert options._timeout == timedelta(seconds=77)
