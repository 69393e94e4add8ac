"""The soak runs for a moment; what is wrong, and what grows, is told."""

from __future__ import annotations

import pytest

from tests.faults import soak
from tests.faults.soak import GROWTH, Tally

HELD = dict.fromkeys(GROWTH, 100.0)


def test_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CALLS_OF_ROUND", 4)
    tally = soak.soak(0, num_cases=3)
    assert not tally.wrong
    counts = dict(tally.counts)
    assert counts.pop("calls") == soak.ROUNDS_PER_SAMPLE * soak.CALLS_OF_ROUND
    assert counts.pop("compared with dense")
    assert sum(counts.values()) == soak.ROUNDS_PER_SAMPLE
    assert {*counts} <= {*soak.FAILURES}


@pytest.mark.parametrize("what", GROWTH)
def test_growth(what: str) -> None:
    steady = [[HELD, HELD]] * 20
    assert not Tally(samples=steady).problems()
    leaking = [[HELD, HELD | {what: 100.0 + 5 * time}] for time in range(20)]
    reported = Tally(samples=leaking).problems()
    assert reported == [f"process 1 holds 195 {what}, after 170"]


def test_growth_while_caches_fill() -> None:
    filling = [[HELD | {"MB": min(80.0 + 10 * time, 100.0)}, HELD] for time in range(20)]
    assert not Tally(samples=filling).problems()
