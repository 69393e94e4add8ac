"""Ranks that make different calls: each is right by what it asked for, or all raise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from tests.faults.calls import WAYS, Ending, make
from tests.faults.decoding import CACHES, DECODED, Decoding, decode_as
from tests.faults.differences import DIFFERENCES, Difference
from tests.faults.worlds import Fate, Worlds

COMPILED = ["mask: sliding 4, causal", "backward skipped", "other order, two shapes"]
"""The differences that are compiled, which takes its time: all are named in the same record."""


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("way", WAYS)
def test_equal_calls(worlds: Worlds, way: str, training: bool) -> None:
    check(worlds, Difference(None), (way, way), training, "zigzag", 2)


@pytest.mark.parametrize(
    ("way", "training"), [("plain", True), ("DTensors", False), ("SDPA", True)]
)
def test_one_rank_is_compiled(worlds: Worlds, way: str, training: bool) -> None:
    """As where the compiler of one rank gives up."""
    ways = "compiled", way
    check(worlds, Difference(None), ways, training, "contiguous", 2)


def cases(also: bool) -> Iterator[tuple[str, str, bool, str, int]]:
    """Each difference in training, where layouts and world sizes take turns.

    In inference those that are told otherwise there, and some; as DTensors, by SDPA and among ranks
    that are no neighbours only some, as all that differs is named in the same record. `also` is
    the rest.
    """
    settings = [*product(("contiguous", "zigzag"), (2, 3))]
    for (number, name), training in product(enumerate(DIFFERENCES), (True, False)):
        is_told = training or number % 2 or DIFFERENCES[name].reported_in_inference != ""
        for index, setting in enumerate(settings):
            if bool(is_told and index == (number + 2 * training) % 4) != also:
                yield name, "plain", training, *setting
        is_turn = training == (number % 2 == 0)
        if (is_turn and number % 3 == 1) != also:
            yield name, "DTensors", training, "zigzag", 2
        if DIFFERENCES[name].suits_sdpa and (is_turn and number % 3 == 0) != also:
            yield name, "SDPA", training, "zigzag", 2
        if training and (number % 4 == 0) != also:
            yield name, "plain", True, "contiguous", 4


@pytest.mark.parametrize(
    ("name", "way", "training", "layout", "world_size"),
    [*cases(False), *(pytest.param(*x, marks=pytest.mark.repeats) for x in cases(True))],
)
def test_different_calls(
    worlds: Worlds, name: str, way: str, training: bool, layout: str, world_size: int
) -> None:
    check(worlds, DIFFERENCES[name], (way,) * world_size, training, layout, world_size)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(worlds: Worlds, name: str) -> None:
    check(worlds, DIFFERENCES[name], ("compiled",) * 2, True, "contiguous", 2)


def check(
    worlds: Worlds,
    difference: Difference,
    ways: tuple[str, ...],
    training: bool,
    layout: str,
    world_size: int,
    *through: Callable[..., Any],
) -> None:
    """All ranks are right, or all raise what differs; `ways` by rank."""
    calls = difference.calls(layout, world_size)
    fates = worlds.run(world_size, *through, make, calls, ways, training)
    spared = [0] if difference.spares_rank_0 else []
    check_fates(fates, calls, difference.expected(training), spared)


def check_fates(
    fates: list[Fate],
    calls: Sequence[Any],
    pattern: str | None,
    spared: Sequence[int] = (),
) -> None:
    """All ranks but the spared ones are told that, or all are right if it is `None`."""
    assert [fate.ended for fate in fates] == ["returned"] * len(fates), fates
    for rank, (fate, call) in enumerate(zip(fates, calls, strict=True)):
        if pattern is None or rank in spared:
            assert fate.value.is_right(call), (rank, fate.value)
        else:
            check_reported(pattern, fate.value, rank)


def check_reported(pattern: str, ending: Ending, rank: int) -> None:
    assert ending.failure is not None, (rank, ending)
    kind, text, _ = ending.failure
    assert kind in ("RingError", "ValueError"), (rank, kind, text)
    assert re.search(pattern, text), (rank, text)


@pytest.mark.parametrize("how", CACHES)
def test_equal_decoding(worlds: Worlds, how: str) -> None:
    cases = (Decoding(how),) * 3
    check_fates(worlds.run(3, decode_as, cases), cases, None)


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        pytest.param(name, odd, marks=[pytest.mark.repeats] * (odd != (number % 4 == 0)))
        for (number, name), odd in product(enumerate(DECODED), (0, 1))
    ],
)
def test_different_decoding(worlds: Worlds, name: str, odd: int) -> None:
    difference = DECODED[name]
    cases = difference.by_rank(Decoding(), 3, odd)
    spared = [odd] if difference.spares_rank_0 else []
    check_fates(worlds.run(3, decode_as, cases), cases, difference.reported, spared)
