"""Calls of ranks that agree or differ: words, group states, waits, and what each rank is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Barrier, Thread, Timer
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring import Mask, RingError, SequenceAxis, ring_attention
from dtensor_ring.agreement.call_record import (
    MAX_BYTES,
    CallRecord,
    CallSite,
    differences,
    reason_of,
)
from dtensor_ring.agreement.group_state import FIRST_WARNING, GroupState, Watch
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.transport.transport import ABORT_TAG, P2P, ProcessGroupTransport, Work
from tests.faults.breaking import patience
from tests.pool import on_ranks

Found = tuple[str, dict[str, Any]]
"""The text of an error, and its attributes."""


def inputs(requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    return [torch.randn(1, 2, 8, 4, requires_grad=requires_grad) for _ in range(3)]


def error_of(call: Callable[[], Any]) -> Found:
    with pytest.raises(RingError) as caught:
        call()
    return str(caught.value), vars(caught.value)


@on_ranks(3)
def test_a_difference_is_named_on_every_rank() -> None:
    mesh, scale = init_device_mesh("cpu", (3,)), 0.5 if dist.get_rank() else 0.25
    tensors = inputs()
    call = lambda: ring_attention(*tensors, mesh=mesh, scale=scale, mask=Mask.full())  # noqa: E731
    first, again = error_of(call), error_of(call)
    assert "they differ in scale: " in first[0]
    assert "0.25 on rank 0" in first[0]
    assert first[1]["ring"] == (0, 1, 2)
    assert first[1]["direction"] == "forward"
    assert first[1]["peer"] in {0, 1, 2} - {dist.get_rank()}
    assert "takes no more calls since" in again[0]
    assert "they differ in scale" in again[0]


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
@on_ranks(3)
def test_a_kernel_of_one_rank_raises(direction: str) -> None:
    """The others are told which and why; that rank cannot go on alone."""
    mesh = init_device_mesh("cpu", (3,))
    _gradient(mesh)
    if dist.get_rank() == 1:
        with _failing(direction, 0), pytest.raises(Failing):
            _gradient(mesh)
    text, attributes = error_of(lambda: _gradient(mesh))
    is_odd = dist.get_rank() == 1
    assert f"rank 1 raised, in {direction}, step 0: Failing: no memory" in text
    assert ("takes no more calls since" in text) == is_odd, "it tried again"
    assert attributes["direction"] == ("" if is_odd else direction)


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


# Words: what differs is named, and messages of calls that differ have other tags.

FIELDS = {"scale": "0.5", "mask": "Mask(left=None, right=0)", "cu_seqlens": "[0, 3, 8]"}


@pytest.mark.parametrize(
    ("fields", "number", "forward_call", "expected"),
    [
        (FIELDS, 7, 3, []),
        (FIELDS | {"scale": "0.25"}, 7, 3, [("scale", "0.5", "0.25")]),
        (FIELDS | {"a": "ü"}, 7, 3, [("a", "none", "ü")]),
        (FIELDS, 8, 3, [("number of the call", "7", "8")]),
        (FIELDS, 7, 2, [("backward of call number", "3", "2")]),
    ],
)
def test_differences_are_named(
    fields: dict[str, str], number: int, forward_call: int, expected: list[tuple[str, str, str]]
) -> None:
    one, other = CallRecord(FIELDS), CallRecord(fields)
    mine, theirs = one.message(7, 3), other.message(number, forward_call)
    assert differences(mine, theirs) == expected
    assert differences(mine + b"data", theirs + b"other data") == expected


def test_what_does_not_fit_counts_too() -> None:
    one, other = (CallRecord({"cu_seqlens": "1, " * 4000 + end}) for end in ("5", "6"))
    assert len(one.message(1, 0)) == len(other.message(1, 0)) == MAX_BYTES
    (found,) = differences(one.message(1, 0), other.message(1, 0))
    assert found[0] == "what does not fit into the record"
    assert differences(one.message(1, 0), one.message(1, 0)) == []


def test_call_sites_are_named() -> None:
    one, other, unknown = (
        CallRecord(FIELDS).message(1, 0, CallSite(*where))
        for where in (("a.py:1 in f", "0", "R, S(2)"), ("x" * 200, "y" * 200 + "1", "S(2)"), ())
    )
    differing = [("call site", "a.py:1 in f", "x" * 96), ("layer", "0", "y" * 63 + "1")]
    differing += [("placements", "R, S(2)", "S(2)")]
    assert differences(one, other) == differing
    assert differences(one, unknown) == differences(unknown, one) == []


def test_tags_differ() -> None:
    record_works = [CallRecord(FIELDS), CallRecord(FIELDS | {"scale": "0.25"})]
    tags = [
        x.tag(number, forward_call)
        for x in record_works
        for number in range(50)
        for forward_call in range(50)
    ]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < ABORT_TAG for tag in tags), "no record has the tag of an abort"
    assert CallRecord(FIELDS).tag(3, 1) == record_works[0].tag(3, 1), "those of one call are alike"


@pytest.mark.parametrize(
    ("text", "waited", "reason"),
    [
        ("Timed out waiting 3000ms", 0.5, "the time limit of the group is over"),
        ("Connection closed by peer", 0.5, "its connection is closed"),
        ("Connection closed by peer", 3.0, "the time limit of the group is over"),
    ],
)
def test_a_connection_that_closes_at_the_time_limit(text: str, waited: float, reason: str) -> None:
    """The rank that closed it has waited as long."""
    assert reason_of(RuntimeError(text), waited, limit=3.0).startswith(reason)


# Group states: calls are counted, one at a time, and a group that was shut down takes none.


def test_calls_are_counted() -> None:
    group_state = GroupState((0, 1), sends_records=True)
    for number in (1, 2, 3):
        assert group_state.begin() == number
        group_state.end()


def test_one_thread_at_a_time() -> None:
    group_state, errors = GroupState((0, 1), sends_records=True), []

    def other() -> None:
        try:
            group_state.begin()
        except RingError as error:
            errors.append(str(error))

    for _ in range(2):
        group_state.begin()
        thread = Thread(target=other)
        thread.start()
        thread.join()
        group_state.end()
    assert len(errors) == 2
    assert "two threads" in errors[0]
    assert group_state.number == 2, "what was refused does not count"


def test_refused_with_the_first_cause() -> None:
    group_state = GroupState((4, 2), sends_records=True)
    group_state.cause = "rank 4 raised, in forward, step 1: MemoryError: no"
    with pytest.raises(RingError, match=r"ring \[4, 2\] takes no more .*MemoryError: no.*destroy"):
        group_state.begin()


@pytest.mark.parametrize("is_late", [False, True], ids=["the host waits", "late"])
def test_a_collective_that_an_abort_ends(is_late: bool) -> None:
    """It has no record, so what arrives is the error of a closed connection, before the cause."""
    group_state: Any = GroupState((0, 1), sends_records=True)
    group_state.late = object() if is_late else None
    told = Timer(0.05, setattr, [group_state, "cause", "rank 1 differs"])
    told.start()
    error, text = (RingError, "rank 1 differs") if is_late else (RuntimeError, "^closed$")
    with pytest.raises(error, match=text), group_state.naming_cause():
        raise RuntimeError("closed")
    told.join()


def test_backward_knows_its_forward() -> None:
    group_state = GroupState((0, 1), sends_records=True)
    kept = [torch.zeros(3) for _ in range(3)]
    for x in kept:
        group_state.begin()
        group_state.remember(x)
        group_state.end()
    assert [group_state.forward_call_of(x.view(1, 3)) for x in kept] == [1, 2, 3]
    assert group_state.forward_call_of(kept[0].clone()) == 0, "a copy says nothing"


def test_forward_calls_are_forgotten_with_their_tensors() -> None:
    group_state, first = GroupState((0, 1), sends_records=True), torch.zeros(3)
    for number in range(1000):
        group_state.begin()
        group_state.remember(torch.zeros(3) if number else first)
        group_state.end()
    assert group_state.forward_call_of(first) == 1
    assert len(group_state._forward_calls) < 30


# Waits that last are told, and again after twice the time.

WHAT = "rank 1 waits for rank 0"


class Slow:
    """Calls a function in place of a wait."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.wait = function


def test_waits_are_reported_again_after_twice_the_time() -> None:
    watch, reported = Watch(), list[int]()

    def look() -> None:
        (wait,) = watch.waits.values()
        reported.extend(x for x in range(0, 1000, 5) if watch.due(wait.since + x))

    watch.wait(WHAT, 100.0, Slow(look))
    assert reported == [30, 60, 120, 240, 480, 960]
    assert watch.due(2100.0) == []


def test_a_new_wait_is_reported_in_its_turn() -> None:
    watch, texts = Watch(), list[str]()

    def look() -> None:
        (wait,) = watch.waits.values()
        texts.extend(watch.due(wait.since + FIRST_WARNING))

    for since in (100.0, 200.0):
        watch.wait(WHAT, since, Slow(look))
    assert texts == [f"{WHAT}: 30 s"] * 2


def test_a_wait_that_fails_is_over() -> None:
    watch = Watch()

    def fail() -> None:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        watch.wait(WHAT, 100.0, Slow(fail))
    assert not watch.waits
