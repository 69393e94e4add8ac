"""Ranks that make different calls: each is right by what it asked for, or all raise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.faults.calls import WAYS, Ending, make
from tests.faults.differences import DIFFERENCES, Difference
from tests.faults.worlds import Fate, Worlds

COMPILED = ["mask: sliding 4, causal", "dtype: bfloat16, float32", "backward skipped"]
COMPILED += ["other order, two shapes", "no call"]
"""The differences that are compiled, which takes its time."""
SELDOM_COMPILED = ["documents: other boundaries", "batch", "layout", "scale"]
"""They are named in the same record, which is sent the same way."""


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("way", WAYS)
def test_equal_calls(worlds: Worlds, way: str, training: bool) -> None:
    check(worlds, Difference(None), (way, way), training, "zigzag", 2)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("way", ["plain", "DTensors", "SDPA"])
def test_one_rank_is_compiled(worlds: Worlds, way: str, training: bool) -> None:
    """As where the compiler of one rank gives up."""
    ways = "compiled", way
    check(worlds, Difference(None), ways, training, "contiguous", 2)


SETTINGS = [
    pytest.param(
        *(training, layout, world_size),
        # Every two of the three come together in the others.
        marks=[] if training ^ (layout == "zigzag") ^ (world_size == 3) else pytest.mark.repeats,
        id=f"{'training' if training else 'inference'}-{layout}-{world_size} ranks",
    )
    for training, layout, world_size in product((True, False), ("contiguous", "zigzag"), (2, 3))
]


@pytest.mark.parametrize(("training", "layout", "world_size"), SETTINGS)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_plain(worlds: Worlds, name: str, training: bool, layout: str, world_size: int) -> None:
    check(worlds, DIFFERENCES[name], ("plain",) * world_size, training, layout, world_size)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_are_no_neighbours(worlds: Worlds, name: str) -> None:
    check(worlds, DIFFERENCES[name], ("plain",) * 4, True, "contiguous", 4)


def in_turn(names: Iterable[str]) -> list[Any]:
    """Each name in training or, the next one, in inference; the other of the two repeats
    test_plain."""
    return [
        pytest.param(
            *(name, training),
            id=f"{name}-{'training' if training else 'inference'}",
            marks=() if training == (number % 2 == 0) else pytest.mark.repeats,
        )
        for (number, name), training in product(enumerate(names), (True, False))
    ]


@pytest.mark.parametrize(("name", "training"), in_turn(DIFFERENCES))
def test_dtensors(worlds: Worlds, name: str, training: bool) -> None:
    check(worlds, DIFFERENCES[name], ("DTensors",) * 2, training, "zigzag", 2)


@pytest.mark.parametrize(
    ("name", "training"), in_turn(x for x in DIFFERENCES if DIFFERENCES[x].suits_sdpa)
)
def test_sdpa(worlds: Worlds, name: str, training: bool) -> None:
    check(worlds, DIFFERENCES[name], ("SDPA",) * 2, training, "zigzag", 2)


@pytest.mark.parametrize(
    "name",
    [*COMPILED, *(pytest.param(name, marks=pytest.mark.repeats) for name in SELDOM_COMPILED)],
)
def test_compiled(worlds: Worlds, name: str) -> None:
    check(worlds, DIFFERENCES[name], ("compiled",) * 2, True, "contiguous", 2)


def check(
    worlds: Worlds,
    difference: Difference,
    ways: tuple[str, ...],
    training: bool,
    layout: str,
    world_size: int,
) -> None:
    """All ranks are right, or all raise what differs; `ways` by rank."""
    calls = difference.calls(layout, world_size)
    fates = worlds.run(world_size, make, calls, ways, training)
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
