"""All that the suite does to groups with gloo, done to groups that have NCCL alone: nothing waits
for a record, and all ranks are told within a second of what differs, or failed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

from tests.faults.calls import make
from tests.faults.decoding import CACHES, DECODED, Decoding, decode_as
from tests.faults.differences import DIFFERENCES, Difference
from tests.faults.nccl_alone import alone
from tests.faults.test_differences import check_fates
from tests.faults.test_faults import (
    FAULTS,
    LARGE,
    RETRIES,
    VICTIM,
    Fault,
    check_new_world,
    check_refused,
    check_victim,
    retry,
    suffer,
)
from tests.faults.test_orders import LAYERS, ORDERS, call_within_a_call, swap_layers
from tests.faults.worlds import DEADLINE, Fate, Terms, Worlds


def sampled(names: Iterable[str], kept: set[str]) -> list[Any]:
    """All names; those that are not kept are left out without `--all-cases`."""
    marks = {True: [], False: [pytest.mark.repeats]}
    return [pytest.param(name, id=name, marks=marks[name in kept]) for name in names]


def check(
    worlds: Worlds, difference: Difference, way: str, training: bool, layout: str, world_size: int
) -> None:
    """All ranks are right, or all raise what differs."""
    calls = difference.calls(layout, world_size)
    fates = worlds.run(world_size, alone, make, calls, (way,) * world_size, training)
    spared = [0] if difference.spares_rank_0 else []
    check_fates(fates, calls, difference.expected(training), spared)


@pytest.mark.parametrize("world_size", [2, 3], ids="{} ranks".format)
@pytest.mark.parametrize("way", sampled(["plain", "DTensors", "SDPA", "compiled"], {"plain"}))
def test_equal_calls(worlds: Worlds, way: str, world_size: int) -> None:
    check(worlds, Difference(None), way, True, "zigzag", world_size)


CHECKED = {"batch", "scale", "strategy: tokens for heads", "backward skipped", "no call"}
SUITED = {*DIFFERENCES, *DECODED} - {"batch: 600", "transport"}
"""One is about records that carry messages, which these do not; one sets a transport of its own."""


@pytest.mark.parametrize(("training", "world_size"), [(False, 2), (True, 3)])
@pytest.mark.parametrize("name", sampled([x for x in DIFFERENCES if x in SUITED], CHECKED))
def test_differences(worlds: Worlds, name: str, training: bool, world_size: int) -> None:
    check(worlds, DIFFERENCES[name], "plain", training, "zigzag", world_size)


@pytest.mark.parametrize("world_size", [2, 3], ids="{} ranks".format)
@pytest.mark.parametrize("name", sampled(ORDERS, {"another order of both"}))
def test_orders(worlds: Worlds, name: str, world_size: int) -> None:
    check(worlds, ORDERS[name], "plain", True, "zigzag", world_size)


@pytest.mark.parametrize("family", sampled(LAYERS, {""}))
def test_another_order_of_layers(worlds: Worlds, family: str) -> None:
    for fate in worlds.run(2, alone, swap_layers, family):
        assert fate.ended == "returned", fate
        assert fate.value is not None, "silently wrong"
        assert fate.value.kind == "RingError", fate.value
        assert "layer: " in fate.value.text


@pytest.mark.parametrize("direction", sampled(["forward", "backward"], {"backward"}))
def test_two_threads_on_one_group(worlds: Worlds, direction: str) -> None:
    for fate in worlds.run(2, alone, call_within_a_call, direction):
        assert fate.ended == "returned", fate
        first, second = fate.value
        assert second is not None
        assert "thread" in second.text
        assert first is None or "thread" in first.text, first


@pytest.mark.parametrize("how", sampled(CACHES, {"paged"}))
def test_decoding(worlds: Worlds, how: str) -> None:
    cases = (Decoding(how),) * 3
    check_fates(worlds.run(3, alone, decode_as, cases), cases, None)


@pytest.mark.parametrize(
    "name", sampled([x for x in DECODED if x in SUITED], {"sampled tokens", "a call less"})
)
def test_different_decoding(worlds: Worlds, name: str) -> None:
    difference = DECODED[name]
    cases = difference.by_rank(Decoding(), 3)
    # A rank that makes a call less has left, in the others' words.
    reported = "rank 0" if difference.spares_rank_0 else difference.reported
    spared = [0] if difference.spares_rank_0 else []
    check_fates(worlds.run(3, alone, decode_as, cases), cases, reported, spared)


STRUCK = {"killed, 4 ranks, backward", "kernel, caught", "kernel, uncaught, backward"}
STRUCK |= {"stopped, forward", "killed, decoding, 2 ranks", "append, uncaught"}


@pytest.mark.parametrize("name", sampled(FAULTS, STRUCK))
def test_faults(worlds: Worlds, name: str) -> None:
    fault = FAULTS[name]
    fates = worlds.run(fault.world_size, alone, suffer, fault, terms=fault.terms)
    for rank, fate in enumerate(fates):
        if rank == VICTIM:
            check_victim(fault, fate)
        else:
            check_told(fault, fate, fates[VICTIM].events["fault"])
    check_new_world(worlds, fault.survivors, [fates[rank].pid for rank in fault.survivors])


def check_told(fault: Fault, fate: Fate, since: float) -> None:
    """The error names the ring and the cause; it may be that of the next call, without a step."""
    assert fate.ended == "returned"
    kind, text, fields = fate.value.first
    assert kind == "RingError", text
    assert re.search(fault.reported, text)
    assert fields["ring"] == tuple(range(fault.world_size))
    assert fate.events["told"] > since
    check_refused(fault, fate)


@pytest.mark.parametrize("direction", sampled(["forward", "backward"], {"forward"}))
@pytest.mark.parametrize("name", sampled(RETRIES, {"3 ranks", "1 of 2 ranks"}))
def test_retries(worlds: Worlds, name: str, direction: str) -> None:
    world_size, broken, times = RETRIES[name]
    terms = Terms(deadline=2 * DEADLINE + times / 2)
    fates = worlds.run(world_size, alone, retry, broken, times, direction, terms=terms)
    for rank, fate in enumerate(fates):
        assert fate.ended == "returned", fate
        kinds, last = fate.value
        assert kinds == ["Broken" if rank in broken else "RingError"] * times
        if len(broken) == world_size:
            assert isinstance(last, float), last
            assert last <= LARGE.tolerance
        else:
            assert re.search("step 0.*Broken.*no memory left", last.text)
    check_new_world(worlds, list(range(world_size)), [fate.pid for fate in fates])
