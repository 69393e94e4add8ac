"""The suite of failures itself: what becomes of ranks, a short soak, and its page."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.faults import soak
from tests.faults.decoding import DECODED
from tests.faults.differences import DIFFERENCES
from tests.faults.page import NOT_TRIED, RIGHT, SAME, SHOWN, rows
from tests.faults.soak import GROWTH, Tally
from tests.faults.test_faults import FAULTS
from tests.faults.test_nccl_alone import SUITED
from tests.faults.worlds import UNMET, USUAL, Failure, Fate, Log, Terms, Worlds
from tests.pool import DROPPED

SHORT = Terms(deadline=4)
"""For processes that are there: a new one may take seconds to begin."""


def do(log: Log, what: str) -> int:
    """Rank 1 does it, and the other waits for nobody."""
    log("begins")
    if dist.get_rank() == 1:
        if what == "raise":
            raise ArithmeticError("seven")
        if what == "exit":
            sys.exit(7)
        if what != "return":
            os.kill(os.getpid(), getattr(signal, what))
    return dist.get_rank()


@pytest.mark.parametrize(
    ("what", "ended"),
    [
        ("return", "returned"),
        ("raise", "raised"),
        ("exit", "raised"),
        ("SIGSTOP", "hung"),
        ("SIGKILL", "SIGKILL"),
        ("SIGABRT", "SIGABRT"),
    ],
)
def test_fates(worlds: Worlds, what: str, ended: str) -> None:
    worlds.run(2, add)
    fates = worlds.run(2, do, what, terms=SHORT if ended == "hung" else USUAL)
    assert [fate.ended for fate in fates] == ["returned", ended]
    assert all("begins" in fate.events for fate in fates)
    if what == "raise":
        assert fates[1].value[:2] == ("ArithmeticError", "seven")
    again = worlds.run(2, add)
    assert [fate.value for fate in again] == [2.0, 2.0]
    assert [a.pid == b.pid for a, b in zip(fates, again, strict=True)] == [True, what == "return"]


def add(log: Log) -> float:
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def test_any_processes_are_a_world(worlds: Worlds) -> None:
    whole, part = worlds.run(3, add), worlds.run([2, 0], add)
    assert [fate.value for fate in part] == [2.0, 2.0]
    assert [fate.pid for fate in part] == [whole[2].pid, whole[0].pid]


def wait_for(log: Log, path: str) -> None:
    log("begins")
    while not Path(path).exists():
        time.sleep(0.01)


def test_events_reach_the_test_while_ranks_run(worlds: Worlds, tmp_path: Path) -> None:
    """Both would hang, did the event come with what they return."""
    seen = tmp_path / "seen"
    fates = worlds.run(2, wait_for, str(seen), terms=Terms(on={"begins": seen.touch}))
    assert [fate.ended for fate in fates] == ["returned", "returned"]
    assert all(fate.events["begins"] <= fate.events["returned"] for fate in fates)


@pytest.mark.parametrize("ended", [UNMET, "raised"])
def test_ranks_that_do_not_meet_try_again(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    num_runs, run = 0, Worlds._run

    def lose_first(*args: object) -> list[Fate]:
        nonlocal num_runs
        num_runs += 1
        fates = run(*args)  # pyrefly: ignore
        if num_runs == 1:
            fates[0].ended, fates[0].value = ended, Failure("RuntimeError", DROPPED, {})
        return fates

    monkeypatch.setattr(Worlds, "_run", lose_first)
    assert [fate.ended for fate in worlds.run(1, do, "return")] == ["returned"]
    assert num_runs == 2


def test_a_process_that_met_nobody_is_replaced(worlds: Worlds) -> None:
    before = [fate.pid for fate in worlds.run(2, do, "return")]
    os.kill(before[1], signal.SIGSTOP)
    fates = worlds.run(2, do, "return", terms=Terms(timeout=1, deadline=4))
    assert [fate.ended for fate in fates] == ["returned", "returned"], "in another attempt"
    assert not {fate.pid for fate in fates} & set(before)


# The soak runs for a moment; what is wrong, and what grows, is told.

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


# The page on failures has the rows of the suite, and says what the suite asks for.


def test_differences() -> None:
    listed = {name: cells for name, *cells in rows("differences")}
    assert list(listed) == list(DIFFERENCES)
    for name, (training, inference, alone) in listed.items():
        reported = training, training if inference == SAME else inference
        for text, is_training in zip(reported, (True, False), strict=True):
            pattern = DIFFERENCES[name].expected(is_training)
            assert text == RIGHT if pattern is None else re.search(pattern, text), (name, text)
        assert alone == (SAME if name in SUITED else NOT_TRIED), (name, alone)


def test_decoding() -> None:
    listed = {name: cells for name, *cells in rows("decoding")}
    assert list(listed) == list(DECODED)
    for name, (text, alone) in listed.items():
        assert re.search(DECODED[name].reported or "", text), (name, text)
        assert alone == (SAME if name in SUITED else NOT_TRIED), (name, alone)


def test_faults() -> None:
    listed = {name: cells for name, *cells in rows("faults")}
    assert list(listed) == list(SHOWN)
    for name, (_, others, alone) in listed.items():
        assert re.search(FAULTS[name].reported, others), (name, others)
        assert alone == SAME, (name, alone)
