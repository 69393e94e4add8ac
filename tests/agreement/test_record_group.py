"""The gloo group of an axis with NCCL: all ranks make it, or none, and it ends with the axis."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import Mask, RingError, SequenceAxis, ring_attention
from dtensor_ring.agreement import group_state, late_records
from dtensor_ring.agreement.group_state import group_state_of
from dtensor_ring.agreement.late_records import (
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


def test_made_once_and_ended_with_the_group(pool: Pool) -> None:
    assert pool.run(2, make_and_drop) == [(2, 0)] * 2


def make_and_drop() -> tuple[int, int]:
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
        return used, listeners()


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
def test_a_rank_that_cannot_make_one(pool: Pool, problem: str) -> None:
    """Nothing is compared then, on no rank; each says so once, and goes on."""
    for rank, (lines, error) in enumerate(pool.run(2, cannot, problem)):
        assert error < 1e-5
        (line,) = lines
        assert "the calls of ranks [0, 1] are not compared" in line
        assert "GLOO_SOCKET_IFNAME" in line
        assert (problem in line) == (rank == 1), line


def cannot(problem: str) -> tuple[list[str], float]:
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
    return lines, error


def test_fake_groups_make_none(pool: Pool) -> None:
    assert pool.run(1, kinds_of_fake) == [(False, False, False, None)]


def kinds_of_fake() -> tuple[Any, ...]:
    with fake_group(4):
        group = dist.group.WORLD
        assert group is not None
        SequenceAxis(init_device_mesh("cpu", (4,)), "zigzag")
        state = group_state_of(group)
        return has_gloo(group), has_late_messages(group), state.sends_records, state.late


def test_groups_of_gloo_make_none(pool: Pool) -> None:
    assert pool.run(2, kinds_of_gloo) == [(True, False, True, None, 90.0)] * 2


def kinds_of_gloo() -> tuple[Any, ...]:
    group = dist.group.WORLD
    assert group is not None
    SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag")
    has_state = group in group_state._GROUP_STATES
    assert not has_state, "the path of CPUs is as it was: nothing is sent before the first call"
    state = group_state_of(group)
    kinds = has_gloo(group), has_late_messages(group), state.sends_records, state.record_group
    return *kinds, time_limit_of(group).total_seconds()


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


def test_one_rank_has_nobody_to_agree_with(pool: Pool) -> None:
    assert pool.run(1, call_alone) == [0]


def call_alone() -> int:
    with nccl_alone(), patch.object(LateRecords, "post") as post:
        axis = SequenceAxis(init_device_mesh("cpu", (1,)), "zigzag")
        axis.attention(*[torch.ones(1, 2, 4, 4) for _ in range(3)])
    return post.call_count


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


def test_captured_calls_are_compared_once(pool: Pool) -> None:
    """A graph of CUDA is compared where it is captured; nothing asks the device meanwhile."""
    for posted, text in pool.run(2, capture_calls):
        assert posted == [1, 2]
        assert "they differ in scale: " in text


def capture_calls() -> tuple[list[int], str]:
    """The numbers of calls that were posted in a capture, and what differs in it."""

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
        return posted, state.cause or "nothing"
