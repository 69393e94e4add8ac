"""Group states: calls are counted, one at a time, and a group that was shut down takes none."""

from __future__ import annotations

from threading import Thread, Timer
from typing import Any

import pytest
import torch

from dtensor_ring import RingError
from dtensor_ring.agreement.group_state import GroupState


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
