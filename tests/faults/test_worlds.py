"""What becomes of a rank is recorded, whatever it is, and the next world has what it needs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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
