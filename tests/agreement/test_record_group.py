"""The group of records, and records that no host waits for."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import Mask, RingError, SequenceAxis, ring_attention
from dtensor_ring.agreement import group_state, late_records
from dtensor_ring.agreement.call_record import CallRecord, CallSite
from dtensor_ring.agreement.group_state import group_state_of
from dtensor_ring.agreement.late_records import (
    Failed,
    LateRecords,
    PostedCall,
    has_gloo,
    has_late_messages,
    time_limit_of,
)
from dtensor_ring.compute.kernels import KERNELS
from tests.dense import dense_attention
from tests.fake_cuda import fake_cuda
from tests.faults.nccl_alone import TOLD, nccl_alone
from tests.pool import Pool, on_ranks
from tests.rings import fake_group


def listeners() -> int:
    return sum(thread.name == "dtensor_ring records" for thread in threading.enumerate())


def error_of_attention(scale: float = 0.5) -> float:
    """The largest error of a call."""
    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 8, 4, generator=generator) for _ in range(3)]
    local = [x.chunk(2, 2)[dist.get_rank()] for x in whole]
    expected = dense_attention(*whole, Mask.causal(), scale=scale).out.chunk(2, 2)[dist.get_rank()]
    return (ring_attention(*local, mesh=mesh, scale=scale) - expected).abs().max().item()


@on_ranks(2)
def test_made_once_and_ended_with_the_group() -> None:
    """Threads of a group that was used, and after it is gone."""
    with nccl_alone():
        for _ in range(2):
            assert error_of_attention() < 1e-5
        used = listeners()
        others = dist.new_group([0, 1])
        assert group_state_of(others).record_group is not None
        assert listeners() == used + 2
        dist.destroy_process_group(others)
        dist.barrier()
        # It is still referenced here, so no finalizer runs.
        group_state_of(others).look(others, time.monotonic())
        while listeners() > used:
            time.sleep(0.01)
        state = group_state_of(dist.group.WORLD)
        assert state.late is not None
        dist.barrier()
        state.late.close()
        while listeners():
            time.sleep(0.01)
        assert (used, listeners()) == (2, 0)


@contextmanager
def no_network() -> Iterator[None]:
    with patch.object(
        dist.ProcessGroupGloo, "create_default_device", side_effect=RuntimeError("no interface")
    ):
        yield


@contextmanager
def no_connection() -> Iterator[None]:
    class Unconnected:
        create_default_device = dist.ProcessGroupGloo.create_default_device

        def __init__(self, *args: Any) -> None:
            raise RuntimeError("no route to host")

    with patch.object(dist, "ProcessGroupGloo", Unconnected):
        yield


PROBLEMS = {"no interface": no_network, "no route to host": no_connection}


@pytest.mark.parametrize("problem", PROBLEMS)
@on_ranks(2)
def test_a_rank_that_cannot_make_one(problem: str) -> None:
    """Nothing is compared then, on no rank; each says so once, and goes on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dtensor_ring")
    logger.addHandler(handler)
    try:
        with (
            nccl_alone(),
            patch.object(late_records, "CONNECT_TIMEOUT", 3.0),
            PROBLEMS[problem]() if dist.get_rank() else nullcontext(),
        ):
            SequenceAxis(init_device_mesh("cpu", (2,)), "contiguous")
            error = error_of_attention()
            assert not group_state_of(dist.group.WORLD).sends_records
    finally:
        logger.removeHandler(handler)
    assert error < 1e-5
    (line,) = lines
    assert "the calls of ranks [0, 1] are not compared" in line
    assert "GLOO_SOCKET_IFNAME" in line
    assert (problem in line) == (dist.get_rank() == 1), line


@on_ranks(1)
def test_fake_groups_make_none() -> None:
    with fake_group(4):
        group = dist.group.WORLD
        assert group is not None
        SequenceAxis(init_device_mesh("cpu", (4,)), "zigzag")
        state = group_state_of(group)
        assert not has_gloo(group)
        assert not has_late_messages(group)
        assert not state.sends_records
        assert state.late is None


@on_ranks(2)
def test_groups_of_gloo_make_none() -> None:
    group = dist.group.WORLD
    assert group is not None
    SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag")
    has_state = group in group_state._GROUP_STATES
    assert not has_state, "the path of CPUs is as it was: nothing is sent before the first call"
    state = group_state_of(group)
    kinds = has_gloo(group), has_late_messages(group), state.sends_records, state.record_group
    assert (*kinds, time_limit_of(group).total_seconds()) == (True, False, True, None, 90.0)


@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "usual"])
def test_strict_axes_wait(pool: Pool, is_strict: bool) -> None:
    """A strict axis raises in the call that differs, others by the next one."""
    for raised, text in pool.run(2, differ, is_strict):
        assert raised == ("first" if is_strict else "second")
        assert "they differ in scale: " in text


def differ(is_strict: bool) -> tuple[str, str]:
    with nccl_alone(0.2):
        axis = SequenceAxis(init_device_mesh("cpu", (2,)), "contiguous", strict=is_strict)
        tensors = [torch.ones(1, 2, 4, 4) for _ in range(3)]
        try:
            axis.attention(*tensors, scale=0.5 + dist.get_rank())
        except RingError as error:
            return "first", str(error)
        state = group_state_of(dist.group.WORLD)
        end = time.monotonic() + 10 * TOLD
        while state.cause is None and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(RingError) as caught:
            axis.attention(*tensors)
        return "second", str(caught.value)


@on_ranks(1)
def test_one_rank_has_nobody_to_agree_with() -> None:
    with nccl_alone(), patch.object(LateRecords, "post") as post:
        axis = SequenceAxis(init_device_mesh("cpu", (1,)), "zigzag")
        axis.attention(*[torch.ones(1, 2, 4, 4) for _ in range(3)])
    assert not post.call_count


WAITS = {"wait", "wait_for", "join", "sleep", "synchronize", "result", "barrier", "confirm"}
"""Functions, of Python or of C++, in which a thread may block."""


@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "usual"])
@on_ranks(2)
def test_nothing_blocks_before_the_kernel(is_strict: bool) -> None:
    """Between the record, the first messages and the first launch of a forward, and a backward."""
    found: list[list[str]] = []
    kernel, post = KERNELS["reference"], LateRecords.post

    def begin(this: LateRecords, call: PostedCall) -> None:
        found.append([])
        post(this, call)
        sys.setprofile(profile)

    def profile(frame: Any, event: str, function: Any) -> None:
        name = function.__name__ if event == "c_call" else frame.f_code.co_name
        if event in ("call", "c_call") and name in WAITS:
            found[-1].append(name)

    def launch(called: Any, *args: Any) -> Any:
        sys.setprofile(None)
        return called(*args)

    with (
        nccl_alone(),
        patch.object(LateRecords, "post", begin),
        patch.object(type(kernel), "forward", partial(launch, kernel.forward)),
        patch.object(type(kernel), "backward", partial(launch, kernel.backward)),
    ):
        mesh = init_device_mesh("cpu", (2,))
        axis = SequenceAxis(mesh, "zigzag", kernel="reference", strict=is_strict)
        tensors = [torch.ones(1, 2, 4, 4, requires_grad=True) for _ in range(3)]
        axis.attention(*tensors).sum().backward()
    assert [bool(x) for x in found] == [is_strict] * 2, found


@on_ranks(2)
def test_captured_calls_are_compared_once() -> None:
    """A graph of CUDA is compared where it is captured; nothing asks the device meanwhile."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("this would end the capture")

    with (
        nccl_alone(),
        fake_cuda(),
        patch.object(torch.cuda, "synchronize", refuse),
        patch.object(torch.cuda.Event, "record", refuse),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        patch.object(LateRecords, "post", autospec=True, side_effect=LateRecords.post) as post,
    ):
        axis = SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag")
        tensors = [torch.ones(1, 2, 4, 4) for _ in range(3)]
        axis.attention(*tensors)
        state = group_state_of(dist.group.WORLD)
        with suppress(RingError):  # the stand-in's waits may be told of it at once
            axis.attention(*tensors, scale=0.5 + dist.get_rank())
        posted = [call.args[1].number for call in post.call_args_list]
        end = time.monotonic() + 10 * TOLD
        while state.cause is None and time.monotonic() < end:
            time.sleep(0.01)
        assert posted == [1, 2]
        assert "they differ in scale: " in (state.cause or "nothing")


# Records that no host waits for: what is sent, what is compared, and who is told of what.

DEADLINE = 30.0
"""Seconds after which something hangs."""
ONE, OTHER = CallRecord({"scale": "0.5"}), CallRecord({"scale": "0.25"})
SITE = CallSite("a.py:1 in f", "layer 0", "R, S(2)")
FEW = 37
"""Bytes of a record whose kind is known."""


class Rank(LateRecords):
    """A rank of a ring in this process; knows what it sent, and why it failed."""

    def __init__(self, group: dist.ProcessGroupGloo, size: int) -> None:
        self.sizes: list[int] = []
        self.failures: list[Failed] = []
        self.number = 0
        super().__init__(group, tuple(range(size)), self._note)

    def _note(self, failed: Failed) -> None:
        self.failures.append(failed)
        self.abort()

    def _send(self, message: bytes, seconds: float = 0.0) -> None:
        self.sizes.append(len(message))
        super()._send(message, seconds)

    def call(self, record: CallRecord = ONE, site: tuple[str, str, str] = SITE) -> None:
        self.number += 1
        self.post(PostedCall(record, self.number, 0, site, "forward", time.monotonic()))

    def failure(self) -> Failed:
        """Why it fails, soon."""
        until(lambda: bool(self.failures))
        (failed,) = self.failures
        return failed


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.005)


@contextmanager
def ring(size: int) -> Iterator[list[Rank]]:
    """The ranks of a ring, which end with the context."""
    store, limit = dist.HashStore(), timedelta(seconds=DEADLINE)
    with ThreadPoolExecutor(size) as threads:
        make = lambda rank: dist.ProcessGroupGloo(store, rank, size, limit)  # noqa: E731
        groups = list(threads.map(make, range(size)))
    ranks = [Rank(group, size) for group in groups]
    yield ranks
    for rank in ranks:
        rank.close()
    # A receive that is left would come back from gloo while the interpreter ends, and abort it. A
    # send to a rank that closes at this moment may stay there until the limit of the group.
    assert not any(thread.is_alive() for rank in ranks for thread in rank._threads[1:])


@pytest.mark.parametrize("size", [2, 3])
def test_equal_calls_are_confirmed(size: int) -> None:
    with ring(size) as ranks:
        for record in (ONE, OTHER, ONE):
            for rank in ranks:
                rank.call(record)
        assert all(rank.confirm(DEADLINE) for rank in ranks)
    assert not any(rank.failures for rank in ranks)


def test_a_rank_may_be_far_ahead() -> None:
    with ring(2) as (first, last):
        for _ in range(50):
            first.call()
        assert not first.confirm(0.1), "the other rank has not called yet"
        for _ in range(50):
            last.call()
        assert first.confirm(DEADLINE)
        assert last.confirm(DEADLINE)


def test_a_kind_is_sent_in_full_once() -> None:
    records = [CallRecord({"scale": str(i)}) for i in range(3)]
    with patch.object(late_records, "MAX_KINDS", 2), ring(2) as ranks:
        for i in (0, 0, 1, 0, 2, 0):  # the last one was dropped for the one before it
            for rank in ranks:
                rank.call(records[i])
        assert all(rank.confirm(DEADLINE) for rank in ranks)
        until(lambda: len(ranks[0].sizes) == 6)
    is_full = [size > FEW for size in ranks[0].sizes[:6]]
    assert is_full == [True, False, True, False, True, True]
    assert ranks[0].sizes[1] == FEW


def test_a_difference_is_named_though_only_a_hash_was_sent() -> None:
    with ring(2) as ranks:
        for record in (ONE, OTHER):
            for rank in ranks:
                rank.call(record)
        ranks[0].call(ONE)
        ranks[1].call(OTHER)
        failures = [rank.failure() for rank in ranks]
        # A rank that is told first need not have sent its third record.
        assert {size for rank in ranks for size in rank.sizes[2:]} == {FEW}
    # One may be told by the closed connection of the other, which was first.
    text = next(failed.text for failed in failures if "they differ" in failed.text)
    assert "scale: 0.5 on rank 0, 0.25 on rank 1" in text or "0.25 on rank 1, 0.5 on rank" in text
    assert "in forward, call 3 of the group, a.py:1 in f" in text


def test_call_sites_are_compared_if_both_are_known() -> None:
    unknown, other = CallSite(layer="layer 0"), SITE._replace(line="b.py:2 in g")
    with ring(2) as ranks:
        for rank, site in zip(ranks, (SITE, unknown), strict=True):
            rank.call(site=site)
        assert all(rank.confirm(DEADLINE) for rank in ranks)
        for rank, site in zip(ranks, (SITE, other), strict=True):
            rank.call(site=site)
        texts = [rank.failure().text for rank in ranks]
    assert any("they differ in call site: " in text for text in texts)


def test_a_rank_that_ends_says_goodbye() -> None:
    with ring(2) as (first, last):
        for rank in (first, last):
            rank.call()
        assert last.confirm(DEADLINE)
        first.close()
        until(lambda: last._last_of_previous == 1)
        assert not last.failures, "it made all calls"
        last.call()
        text = last.failure().text
    assert "rank 1 got no answer of rank 0, in forward, call 2 of the group" in text
    assert "it ended, or destroyed its group, after call 1" in text


def test_the_next_rank_may_leave_first() -> None:
    """It made all calls: that the last record does not reach it any more is no failure."""
    with ring(3) as ranks:
        for rank in ranks:
            rank.call()
        assert all(rank.confirm(DEADLINE) for rank in ranks)
        ranks[1].close()
        until(lambda: ranks[2]._last_of_previous == 1)
        ranks[0].call()
        assert not ranks[0].confirm(0.2)
        assert not ranks[0].failures


def test_a_rank_that_ends_too_early() -> None:
    with ring(2) as (first, last):
        last.call()
        assert not last.confirm(0.05)
        first.close()
        assert "after call 0" in last.failure().text


def test_a_lost_connection_is_told_around_the_ring() -> None:
    with ring(3) as ranks:
        for rank in ranks:
            rank.call()
        assert all(rank.confirm(DEADLINE) for rank in ranks)
        ranks[1].abort()
        failures = [ranks[i].failure() for i in (2, 0)]
    assert [failed.peer for failed in failures] == [1, 2]
    assert "rank 2 got no answer of rank 1" in failures[0].text
    assert "after call 1 of the group: its connection is closed" in failures[0].text


def test_a_record_that_does_not_come() -> None:
    with ring(2) as (first, last):
        last.call()
        now = time.monotonic()
        last.check_time(now + 4, 5.0)
        assert not last.failures
        last.check_time(now + 6, 5.0)
        assert "the time limit of the group is over" in last.failure().text
        assert "in forward, call 1 of the group" in last.failure().text
        assert "closed" in first.failure().text


def test_a_forked_process_closes_nothing() -> None:
    with ring(2) as ranks:
        with patch.object(os, "getpid", return_value=-1):
            ranks[0].close()
        for rank in ranks:
            rank.call()
        assert all(rank.confirm(DEADLINE) for rank in ranks)
