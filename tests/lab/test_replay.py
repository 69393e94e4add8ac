"""Recordings are replayed as clocks of each rank tell, and equal ranks are recorded once."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_ring import Mask, Slices, TransferPolicy
from dtensor_ring.lab.machine import FORMS, Curve, KernelSpeed, Links, Machine
from dtensor_ring.lab.problem import SimulatedProblem, problem_of
from dtensor_ring.lab.recorded_ranks import RecordedRanks, looked_at, rank_attention
from dtensor_ring.lab.replay import KernelSeconds, least_alone, least_tiles, replayed
from dtensor_ring.lab.simulated_attention import has_segments, timeline_of
from dtensor_ring.planning.strategy import Strategy, as_strategy, every_strategy, why_not
from tests.lab.clocks import Clocks
from tests.lab.machines import links, round_machine

SIZES = (1, 2, 3, 4, 5, 6, 8, 8, 12, 16, 24)
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


def check(seed: int, largest: int) -> None:
    """What is replayed of the ranks that differ is what clocks tell of all of them."""
    draw = Random(seed)
    (asked, strategy), found = problem(draw, largest), machine(draw)
    kernels = KernelSeconds(found, asked.dtype, asked.sizes.head_dims[0], None)
    segments = has_segments(found.speed(asked.dtype, 64, "full").kernel)
    ranks = RecordedRanks(asked, strategy, segments, not found.host_waits)
    each = [
        list(rank_attention(asked, strategy, x).recordings(segments, not found.host_waits))
        for x in range(asked.world_size)
    ]
    times, alone = list[float](), list[float]()
    for is_forward in (True, False):
        told = replayed(ranks, kernels, is_forward)
        recordings = [x[not is_forward] for x in each]
        clocks = Clocks(recordings, kernels, strategy.heads, is_forward).run()
        scale = max(*(x.free for x in clocks), 1e-12)
        for name, values in (("free", told.ends), ("waited", told.waited)):
            expected = np.array([getattr(x, name) for x in clocks])
            most = float(np.abs(values - expected).max() / scale)
            assert most < 1e-9, f"seed {seed}, {name}: {values} and {expected}"
        sent = [x.sends[:, 2].sum() for x in recordings]
        assert told.sent.tolist() == sent, f"seed {seed}"
        times.append(told.ends.max() * (1 + 1e-12))
        alone.append(least_alone(ranks, kernels, is_forward))
    assert least_tiles(ranks, kernels) <= sum(times), f"seed {seed}"
    assert all(x <= y for x, y in zip(alone, times, strict=True)), f"seed {seed}"


def test_replayed_as_clocks_of_each_rank_tell(request: pytest.FixtureRequest) -> None:
    wanted = 100 if request.config.getoption("--all-cases") else 24
    for seed in range(wanted):
        check(seed, 24 if seed % 8 == 7 else 8)


def test_equal_ranks_are_recorded_once() -> None:
    """Under a full mask all ranks do the same, under a causal one none of a zigzag ring's."""
    counts = {}
    for mask in (Mask.full(), Mask.causal()):
        for spec in ("around", "ulysses:2+around", "ulysses:8"):
            asked = of_ranks(mask, 8)
            ranks = RecordedRanks(asked, asked.able(spec), True, True)
            counts[mask.left, mask.right, spec] = len(ranks.direction(is_forward=True))
    assert list(counts.values()) == [1, 2, 2, 8, 8, 2]


def of_ranks(mask: Mask, size: int) -> SimulatedProblem:
    return problem_of(
        *(mask, 1024 * size, size, (16, 8), 64, None),
        slices=None,
        layout="zigzag",
        batch=1,
        dtype="bfloat16",
        policy=TransferPolicy(),
    )


MANY = replace(round_machine(kernel=1e14), inside=links(1e-5, 2e11), between=links(2e-5, 4e10))


@pytest.mark.parametrize(
    ("spec", "mask"),
    [
        ("around", Mask.causal()),
        ("around", Mask.full()),
        ("direct", Mask.sliding(2000)),
        ("ulysses:2+all_gather", Mask.causal()),
    ],
)
def test_many_ranks_are_like_the_nearest(
    spec: str, mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of 32 ranks tells the times and bytes of all, and the report says so."""
    asked = of_ranks(mask, 32)
    every = timeline_of(asked, asked.able(spec), MANY)
    assert "ranks" not in str(every)
    monkeypatch.setattr("dtensor_ring.lab.recorded_ranks.MAX_RECORDED", 8)
    some = timeline_of(asked, asked.able(spec), MANY)
    assert f"from {some.num_planned} of 32 ranks; others are like the nearest" in str(some)
    assert some.num_planned <= 8
    assert some.seconds == pytest.approx(every.seconds, rel=0.02)
    assert some.num_bytes == pytest.approx(every.num_bytes, rel=0.1)


def test_who_is_looked_at() -> None:
    for size, heads in ((33, 1), (64, 8), (1024, 1), (1024, 4), (96, 32)):
        found = looked_at(size, heads)
        ranks = np.unique(found)
        assert {0, size - 1} <= {*ranks.tolist()}
        assert len(ranks) <= 32
        assert (found[ranks] == ranks).all()
