"""The recurrence over arrays tells the same times as processes that wait for one another."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_ring import Mask, Slices, TransferPolicy
from dtensor_ring.lab.machine import FORMS, Curve, KernelSpeed, Links, Machine
from dtensor_ring.lab.problem import SimulatedProblem, problem_of
from dtensor_ring.lab.recurrence import RingTimes, has_segments
from dtensor_ring.planning.strategy import Strategy, as_strategy, every_strategy, why_not

simpy = pytest.importorskip("simpy")
from tests.lab.oracle import Oracle  # noqa: E402 - needs simpy

DIRECTIONS = ("forward", "backward")
SIZES = (1, 2, 3, 4, 5, 6, 8, 8, 12, 16, 24, 64)
LAYOUTS = ("zigzag", "contiguous", "striped", "block_cyclic:2", "balanced")
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"kv_dtype": torch.bfloat16},
    {"kv_dtype": "int8"},
    {"grad_dtype": torch.bfloat16},
)


def curve(draw: Random, size: float, seconds: float) -> Curve:
    """A line, or a table of a few sizes."""
    if draw.random() < 0.5:
        return Curve.line(seconds * draw.random() / 4, size / seconds * (0.2 + draw.random()))
    sizes = sorted({size * draw.random() * 4 for _ in range(4)})
    return Curve(tuple(sizes), tuple(sorted(seconds * draw.random() * 4 for _ in sizes)))


def machine(draw: Random) -> Machine:
    name = draw.choice(("any", "any", "cpu_flash"))
    kernels = tuple(
        KernelSpeed(name, dtype, 64, form, *(curve(draw, 1e9, 1e-4) for _ in range(2)), heads)
        for dtype in ("bfloat16", "float32")
        for form in FORMS
        for heads in draw.choice(((0,), (2, 16)))
    )
    inside, between = (Links(*(curve(draw, 1e7, 1e-4) for _ in range(4))) for _ in range(2))
    return Machine(
        *("drawn", "cuda", "measured", draw.choice((1, 2, 3, 8)), 2**30, kernels, {}, 1e12),
        *(curve(draw, 1e7, 1e-5) for _ in range(2)),
        *(inside, between),
        beside_kernel=draw.choice((1.0, 1.7)),
        beside_transfer=draw.choice((1.0, 1.4)),
        launch=draw.choice((0.0, 1e-5)),
        hop=draw.choice((0.0, 3e-5)),
        host_waits=draw.random() < 0.3,
    )


def bounds(draw: Random, seq_len: int, rows: int) -> list[list[int]]:
    def row() -> list[int]:
        inner = sorted(draw.choices(range(seq_len + 1), k=4))
        return [0, *inner, draw.choice((seq_len, max(inner)))]

    return [row() for _ in range(rows)]


def problem(draw: Random, largest: int) -> tuple[SimulatedProblem, Strategy]:
    size = draw.choice([size for size in SIZES if size <= largest])
    seq_len = size * draw.choice((2, 6, 8)) if draw.random() < 0.8 else draw.choice((1, 7, 50))
    layout = draw.choice(LAYOUTS) if seq_len % size == 0 else draw.choice(("zigzag", "contiguous"))
    seen: dict[str, Any] = {"mask": draw.choice((Mask.causal(), Mask.full(), Mask.sliding(5)))}
    rows = draw.choice((1, 1, 2))
    if draw.random() < 0.4:
        seen["cu_seqlens"] = bounds(draw, seq_len, rows)
    elif draw.random() < 0.2 and layout != "balanced":
        seen = {"mask": None, "slices": Slices.prefix([0, seq_len], min(3, seq_len))}
    heads = draw.choice(((8, 8), (8, 2), (6, 3), (64, 4)))
    asked = problem_of(
        **{"cu_seqlens": None, "slices": None, **seen},
        seq_len=seq_len,
        world_size=size,
        heads=heads,
        head_dim=draw.choice((8, 128, 8192)),
        layout=layout,
        batch=rows,
        dtype=draw.choice(("bfloat16", "bfloat16", "float32")),
        policy=TransferPolicy(num_parts=draw.choice((None, None, 1, 3)), **draw.choice(POLICIES)),
        kernel=None,
    )
    able = [x for x in every_strategy(size) if why_not(x, *heads) is None]
    if size % 2 == 0 and size > 2:
        able.append(as_strategy("ulysses:2+all_gather", size))
    return asked, draw.choice(able)


def difference(seed: int, largest: int) -> float:
    """The largest difference between the recurrence and the processes, in parts of the whole."""
    draw = Random(seed)
    (asked, strategy), found = problem(draw, largest), machine(draw)
    times = RingTimes(asked, strategy, found)
    speed = found.speed(asked.dtype, 64, "full")
    oracle = Oracle(asked, strategy, found, has_segments(speed.kernel))
    most = 0.0
    for name in DIRECTIONS:
        told = getattr(times, name)()
        ends, waited = np.array(oracle.run(name == "backward")).T
        scale = max(ends.max(), 1e-12)
        for one, other in ((told.ends, ends), (told.waited, waited)):
            most = max(most, float(np.abs(one - other).max() / scale))
    return most


PLANS_AT_ONCE = 50
# The first block has 60 plans in all with the next, of fewer ranks: processes of 64 take seconds.
BLOCKS = [pytest.param(block, 64, marks=pytest.mark.repeats) for block in range(2, 12)]


@pytest.mark.parametrize(("block", "largest"), [(0, 12), *BLOCKS])
def test_as_processes_that_wait_for_one_another(block: int, largest: int) -> None:
    for seed in range(block * PLANS_AT_ONCE, (block + 1) * PLANS_AT_ONCE):
        assert difference(seed, largest) < 1e-9, f"seed {seed}, at most {largest} ranks"


@pytest.mark.parametrize("seed", range(1000, 1010))
def test_as_processes_of_many_ranks(seed: int) -> None:
    assert difference(seed, 24) < 1e-9
