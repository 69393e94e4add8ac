"""Waits that last are told, and again after twice the time."""

from __future__ import annotations

from dtensor_ring.agreement.group_state import FIRST_WARNING, Watch


def test_waits_are_reported_again_after_twice_the_time() -> None:
    watch = Watch()
    watch.begin("rank 1 waits for rank 0", 100.0)
    (wait,) = watch.waits.values()
    reported = [seconds for seconds in range(0, 1000, 5) if watch.due(wait.since + seconds)]
    assert reported == [30, 60, 120, 240, 480, 960]
    watch.end()
    assert watch.due(wait.since + 2000) == []


def test_a_new_wait_is_reported_in_its_turn() -> None:
    watch = Watch()
    for since in (100.0, 200.0):
        watch.begin("rank 1 waits for rank 0", since)
        (wait,) = watch.waits.values()
        (text,) = watch.due(wait.since + FIRST_WARNING)
        assert text == "rank 1 waits for rank 0: 30 s"
        watch.end()
