"""Errors within a hand-over, and of other groups: no rank waits for one that has left."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import RingError
from dtensor_ring.extension import checked_barrier
from dtensor_ring.handover.call import end_calls, group_beside, handing_over
from tests.pool import on_ranks

CPU = torch.device("cpu")


def waits(group: Any) -> None:
    """For a message that rank 0 does not send."""
    with handing_over(group, {}, CPU) as posts:
        posts.hear(0, torch.zeros(1))
        dist.barrier()


def leaves(group: Any, error: BaseException) -> None:
    with handing_over(group, {}, CPU):
        dist.barrier()  # rank 1 waits now
        raise error


@pytest.mark.parametrize("error", [RingError, ValueError, KeyboardInterrupt])
@on_ranks(2)
def test_an_error_ends_a_hand_over(error: type[BaseException]) -> None:
    group, begin = group_beside(init_device_mesh("cpu", (2,)).get_group()), time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(error, match="of another group") as caught:
            leaves(group, error("of another group"))
        assert caught.value.__cause__ is None
    else:
        with pytest.raises(RingError, match=f"{error.__name__}: of another group"):
            waits(group)
    assert time.monotonic() - begin < 30, "a deadline against hangs"


def hears_and_raises(group: Any) -> None:
    with handing_over(group, {}, CPU) as posts:
        posts.hear(1 - dist.get_rank(), torch.zeros(1))
        raise ValueError("on all")


@on_ranks(2)
def test_all_ranks_raise() -> None:
    """At the same point, but what they wait for was never sent."""
    group, begin = init_device_mesh("cpu", (2,)).get_group(), time.monotonic()
    with pytest.raises(ValueError, match="on all"):
        hears_and_raises(group)
    assert time.monotonic() - begin < 30, "a deadline against hangs"


@on_ranks(2)
def test_calls_of_another_group_end() -> None:
    group, begin = init_device_mesh("cpu", (2,)).get_group(), time.monotonic()
    if dist.get_rank() == 0:
        end_calls(group, ValueError("elsewhere"))
        end_calls(group, ValueError("again"))  # it is shut down already
    else:
        told = "ValueError: elsewhere|they differ in direction"  # whichever comes first
        with pytest.raises(RingError, match=told), checked_barrier(group, "a comparison", {}):
            pass
    assert time.monotonic() - begin < 30, "a deadline against hangs"


@on_ranks(2)
def test_a_group_beside_another() -> None:
    """Messages of a group and of the one beside it are apart, and each compares its own calls."""
    group = init_device_mesh("cpu", (2,)).get_group()
    beside, rank, heard = group_beside(group), dist.get_rank(), torch.zeros(2)
    assert group_beside(group) is beside is not group
    with handing_over(beside, {"step": 1}, CPU) as posts:
        with checked_barrier(group, "within", {}):
            pass
        if rank:
            posts.hear(0, heard)
        else:
            posts.tell([1], torch.tensor([3.0, 4.0]))
    assert heard.tolist() == [3 * rank, 4 * rank]
    with (
        pytest.raises(RingError, match=r"they differ in step: . on rank"),
        handing_over(beside, {"step": rank}, CPU),
    ):
        pass
