"""Calls of ranks that agree, differ, raise, retry: what each rank is told, and what goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Barrier, Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring import Mask, RingError, SequenceAxis, ring_attention
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, Work
from tests.faults.breaking import patience
from tests.pool import Pool, on_ranks

Found = tuple[str, dict[str, Any]]
"""The text of an error, and its attributes."""


def inputs(requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    return [torch.randn(1, 2, 8, 4, requires_grad=requires_grad) for _ in range(3)]


def error_of(call: Callable[[], Any]) -> Found:
    with pytest.raises(RingError) as caught:
        call()
    return str(caught.value), vars(caught.value)


def test_a_difference_is_named_on_every_rank(pool: Pool) -> None:
    for rank, (first, again) in enumerate(pool.run(3, _differ)):
        assert "they differ in scale: " in first[0]
        assert "0.25 on rank 0" in first[0]
        assert first[1]["ring"] == (0, 1, 2)
        assert first[1]["direction"] == "forward"
        assert first[1]["peer"] in {0, 1, 2} - {rank}
        assert "takes no more calls since" in again[0]
        assert "they differ in scale" in again[0]


def _differ() -> tuple[Found, Found]:
    mesh, scale = init_device_mesh("cpu", (3,)), 0.5 if dist.get_rank() else 0.25
    tensors = inputs()
    call = lambda: ring_attention(*tensors, mesh=mesh, scale=scale, mask=Mask.full())  # noqa: E731
    return error_of(call), error_of(call)


@on_ranks(2)
def test_no_messages_but_records() -> None:
    """Documents within shards: nothing else travels, and ranks still agree."""
    mesh, softcap = init_device_mesh("cpu", (2,)), 1.0 + dist.get_rank()
    documents, tensors = torch.tensor([0, 8, 16], dtype=torch.int32), inputs()
    ring_attention(*tensors, mesh=mesh, cu_seqlens=documents)
    text, _ = error_of(
        lambda: ring_attention(*tensors, mesh=mesh, cu_seqlens=documents, softcap=softcap)
    )
    assert "they differ in softcap" in text


@on_ranks(2)
def test_backward_calls_in_another_order() -> None:
    mesh = init_device_mesh("cpu", (2,))
    losses = [ring_attention(*inputs(True), mesh=mesh).sum() for _ in range(2)]
    if dist.get_rank():
        losses.reverse()
    text, attributes = error_of(lambda: [loss.backward() for loss in losses])
    assert "they differ in backward of call number" in text
    assert attributes["direction"] == "backward"


@on_ranks(2)
def test_calls_in_another_order() -> None:
    mesh, (one, other) = init_device_mesh("cpu", (2,)), (inputs(), inputs())
    calls = [
        lambda: ring_attention(*one, mesh=mesh),
        lambda: ring_attention(*other, mesh=mesh),  # on a line of its own, which is reported
    ]
    if dist.get_rank():
        calls.reverse()
    text, _ = error_of(lambda: [call() for call in calls])
    assert "they differ in call site: test_checked_transport.py:" in text


class Failing(Exception):
    """What a kernel raises."""


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("step", [0, 1])
@on_ranks(2)
def test_kernels_of_all_ranks_raise(direction: str, step: int) -> None:
    """The group stays in order, however often; what comes next is right."""
    mesh = init_device_mesh("cpu", (2,))
    before = _gradient(mesh)
    for _ in range(20):
        with patience(), _failing(direction, step), pytest.raises(Failing):
            _gradient(mesh)
    assert torch.equal(before, _gradient(mesh))


def _gradient(mesh: DeviceMesh) -> Tensor:
    tensors = inputs(True)
    ring_attention(*tensors, mesh=mesh, mask=Mask.full(), kernel="reference").sum().backward()
    gradient = tensors[1].grad
    assert gradient is not None
    return gradient


@contextmanager
def _failing(direction: str, step: int) -> Iterator[None]:
    """The kernel raises in a step of one direction."""
    launches, compute = count(), getattr(KERNELS["reference"], direction)

    def run(*args: Any) -> Any:
        if next(launches) >= step:
            raise Failing("no memory")
        return compute(*args)

    with patch.object(KERNELS["reference"], direction, run):
        yield


@contextmanager
def _meeting(inside: Barrier) -> Iterator[None]:
    """The first launch of the kernel waits for another thread, twice."""
    launches, compute = count(), KERNELS["cpu_flash"].forward

    def run(*args: Any) -> Any:
        if not next(launches):
            inside.wait()
            inside.wait()
        return compute(*args)

    with patch.object(KERNELS["cpu_flash"], "forward", run):
        yield


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernel_of_one_rank_raises(pool: Pool, direction: str) -> None:
    """The others are told which and why; that rank cannot go on alone."""
    for rank, (text, attributes) in enumerate(pool.run(3, _raise_on_one, direction)):
        assert f"rank 1 raised, in {direction}, step 0: Failing: no memory" in text
        assert ("takes no more calls since" in text) == (rank == 1), "it tried again"
        assert attributes["direction"] == ("" if rank == 1 else direction)


def _raise_on_one(direction: str) -> Found:
    mesh = init_device_mesh("cpu", (3,))
    _gradient(mesh)
    if dist.get_rank() == 1:
        with _failing(direction, 0), pytest.raises(Failing):
            _gradient(mesh)
    return error_of(lambda: _gradient(mesh))


@on_ranks(2)
def test_two_threads_on_one_group() -> None:
    mesh, texts, tensors = init_device_mesh("cpu", (2,)), list[str](), inputs()
    inside, others = Barrier(2, timeout=60), dist.new_group(range(2))

    def first() -> None:
        with _meeting(inside):
            texts.append(error_of(lambda: ring_attention(*tensors, mesh=mesh))[0])

    thread = Thread(target=first)
    thread.start()
    inside.wait()  # the other thread is in a kernel
    dist.barrier(others)  # on both ranks: what follows closes the connections of the ring
    texts.append(error_of(lambda: ring_attention(*tensors, mesh=mesh))[0])
    inside.wait()
    thread.join()
    assert len(texts) == 2, "neither goes on"
    assert all("two threads of a rank called a ring of one group at once" in x for x in texts)


class Tagless(ProcessGroupTransport):
    """A transport whose messages have no tags, as NCCL's; knows what was awaited before them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.num_started = 0

    def keeps_tags(self, device: torch.device) -> bool:
        return False

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        self.num_started += 1
        return super().start(receives, sends)


@on_ranks(2)
def test_without_tags_ranks_agree_first() -> None:
    mesh = init_device_mesh("cpu", (2,))
    transport = Tagless(mesh.get_group())
    axis = SequenceAxis(mesh, "zigzag", transport=transport)
    tensors = inputs()
    for _ in range(2):
        axis.attention(*tensors)
    if dist.get_rank():
        tensors = [x.double() for x in tensors]
    text, _ = error_of(lambda: axis.attention(*tensors))
    assert transport.num_started == 2, "the hops of two calls that agreed, none of the last"
    assert "they differ in dtype: torch.float" in text


class Full(ProcessGroupTransport):
    """A transport that has no memory for messages."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        raise Failing("no buffers")


@on_ranks(2)
def test_ranks_raise_at_two_points_of_one_step() -> None:
    """One has started messages, the other has not: they are not alike, and nobody waits."""
    mesh = init_device_mesh("cpu", (2,))
    transport = None if dist.get_rank() else Full(mesh.get_group())
    axis = SequenceAxis(mesh, "zigzag", transport=transport, kernel="reference")
    tensors = inputs()
    with _failing("forward", 0), pytest.raises(Failing):
        axis.attention(*tensors)
    text, _ = error_of(lambda: axis.attention(*tensors))
    assert "takes no more calls since rank" in text
    assert "raised, in forward, step 0: Failing: no" in text
