"""Sessions: calls are counted, one at a time, and a group that was shut down takes none."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from dtensor_ring import RingError
from dtensor_ring.agreement.session import Session


def test_calls_are_counted() -> None:
    session = Session((0, 1), has_words=True)
    for number in (1, 2, 3):
        assert session.begin() == number
        session.end()


def test_one_thread_at_a_time() -> None:
    session, errors = Session((0, 1), has_words=True), []

    def other() -> None:
        try:
            session.begin()
        except RingError as error:
            errors.append(str(error))

    for _ in range(2):
        session.begin()
        thread = Thread(target=other)
        thread.start()
        thread.join()
        session.end()
    assert len(errors) == 2
    assert "two threads" in errors[0]
    assert session.number == 2, "what was refused does not count"


def test_refused_with_the_first_cause() -> None:
    session = Session((4, 2), has_words=True)
    session.cause = "rank 4 raised, in forward, step 1: MemoryError: no"
    with pytest.raises(RingError, match=r"ring \[4, 2\] takes no more .*MemoryError: no.*destroy"):
        session.begin()


def test_backward_knows_its_forward() -> None:
    session = Session((0, 1), has_words=True)
    kept = [torch.zeros(3) for _ in range(3)]
    for x in kept:
        session.begin()
        session.remember(x)
        session.end()
    assert [session.origin_of(x.view(1, 3)) for x in kept] == [1, 2, 3]
    assert session.origin_of(kept[0].clone()) == 0, "a copy says nothing"


def test_origins_are_forgotten_with_their_tensors() -> None:
    session, first = Session((0, 1), has_words=True), torch.zeros(3)
    for number in range(1000):
        session.begin()
        session.remember(torch.zeros(3) if number else first)
        session.end()
    assert session.origin_of(first) == 1
    assert len(session._origins) < 30
