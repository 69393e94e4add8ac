"""All that the suite does to groups with gloo, done to groups that have NCCL alone: nothing waits
for a record, and all ranks are told within a second of what differs, or failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.faults.decoding import CACHES, DECODED, Decoding, decode_as
from tests.faults.differences import DIFFERENCES, Difference
from tests.faults.nccl_alone import alone
from tests.faults.test_differences import (
    LAYERS,
    ORDERS,
    check,
    check_fates,
    check_two_threads,
    swap_layers,
)
from tests.faults.test_faults import FAULTS, RETRIES, check_fault, check_retries
from tests.faults.worlds import Worlds


def sampled(names: Iterable[str], kept: set[str]) -> list[Any]:
    """All names; those that are not kept are left out without `--all-cases`."""
    marks = {True: [], False: [pytest.mark.repeats]}
    return [pytest.param(name, id=name, marks=marks[name in kept]) for name in names]


@pytest.mark.parametrize("world_size", [2, 3], ids="{} ranks".format)
@pytest.mark.parametrize("way", sampled(["plain", "DTensors", "SDPA", "compiled"], {"plain"}))
def test_equal_calls(worlds: Worlds, way: str, world_size: int) -> None:
    check(worlds, Difference(None), (way,) * world_size, True, "zigzag", world_size, alone)


CHECKED = {"batch", "scale", "strategy: tokens for heads", "backward skipped", "no call"}
SUITED = {*DIFFERENCES, *DECODED} - {"batch: 600", "transport"}
"""One is about records that carry messages, which these do not; one sets a transport of its own."""


@pytest.mark.parametrize(("training", "world_size"), [(False, 2), (True, 3)])
@pytest.mark.parametrize("name", sampled([x for x in DIFFERENCES if x in SUITED], CHECKED))
def test_differences(worlds: Worlds, name: str, training: bool, world_size: int) -> None:
    ways = ("plain",) * world_size
    check(worlds, DIFFERENCES[name], ways, training, "zigzag", world_size, alone)


@pytest.mark.parametrize("world_size", [2, 3], ids="{} ranks".format)
@pytest.mark.parametrize("name", sampled(ORDERS, {"another order of both"}))
def test_orders(worlds: Worlds, name: str, world_size: int) -> None:
    check(worlds, ORDERS[name], ("plain",) * world_size, True, "zigzag", world_size, alone)


@pytest.mark.parametrize("family", sampled(LAYERS, {""}))
def test_another_order_of_layers(worlds: Worlds, family: str) -> None:
    for fate in worlds.run(2, alone, swap_layers, family):
        assert fate.ended == "returned", fate
        assert fate.value is not None, "silently wrong"
        assert fate.value.kind == "RingError", fate.value
        assert "layer: " in fate.value.text


@pytest.mark.parametrize("direction", sampled(["forward", "backward"], {"backward"}))
def test_two_threads_on_one_group(worlds: Worlds, direction: str) -> None:
    check_two_threads(worlds, direction, alone)


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
    """The error may be that of the next call, without a step."""
    check_fault(worlds, FAULTS[name], alone)


@pytest.mark.parametrize("direction", sampled(["forward", "backward"], {"forward"}))
@pytest.mark.parametrize("name", sampled(RETRIES, {"3 ranks", "1 of 2 ranks"}))
def test_retries(worlds: Worlds, name: str, direction: str) -> None:
    check_retries(worlds, name, direction, alone)
