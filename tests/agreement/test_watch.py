"""Waits that last are told, and again after twice the time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtensor_ring.agreement.group_state import FIRST_WARNING, Watch

WHAT = "rank 1 waits for rank 0"


class Work:
    """Calls a function in place of a wait."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.wait = function


def test_waits_are_reported_again_after_twice_the_time() -> None:
    watch, reported = Watch(), list[int]()

    def look() -> None:
        (wait,) = watch.waits.values()
        reported.extend(x for x in range(0, 1000, 5) if watch.due(wait.since + x))

    watch.wait(WHAT, 100.0, Work(look))
    assert reported == [30, 60, 120, 240, 480, 960]
    assert watch.due(2100.0) == []


def test_a_new_wait_is_reported_in_its_turn() -> None:
    watch, texts = Watch(), list[str]()

    def look() -> None:
        (wait,) = watch.waits.values()
        texts.extend(watch.due(wait.since + FIRST_WARNING))

    for since in (100.0, 200.0):
        watch.wait(WHAT, since, Work(look))
    assert texts == [f"{WHAT}: 30 s"] * 2


def test_a_wait_that_fails_is_over() -> None:
    watch = Watch()

    def fail() -> None:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        watch.wait(WHAT, 100.0, Work(fail))
    assert not watch.waits
