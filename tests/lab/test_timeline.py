"""Recordings become time lines of attentions, as clocks of each rank tell."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from dtensor_ring import Mask, Slices, TransferPolicy, compare_strategies
from dtensor_ring.compute.kernels import Saved, Scores
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.trace import Label
from dtensor_ring.lab.machine import FORMS, Curve, KernelSpeed, Links, Machine
from dtensor_ring.lab.problem import SimulatedProblem, problem_of
from dtensor_ring.lab.recorded_ranks import RecordedRanks, looked_at, rank_attention
from dtensor_ring.lab.replay import KernelSeconds, least_alone, least_tiles, replayed
from dtensor_ring.lab.simulated_attention import (
    STREAMS,
    Timeline,
    has_segments,
    simulate_attention,
    timeline_of,
)
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import Strategy, as_strategy, every_strategy, why_not
from dtensor_ring.ring import ring_backward, ring_forward
from tests.lab.clocks import Clocks
from tests.lab.machines import links, round_machine
from tests.played import PlayedTransport, play
from tests.rings import Ring

MACHINE = replace(round_machine(kernel=1e9), inside=links(1e-5, 1e9), host_waits=True)
LABEL = re.compile(r"ring (\w+), step (\d+), source (\d+): (.*)")


def simulated(strategy: str, mask: Mask, **options: Any) -> Timeline:
    asked = mask, 96, 4, (6, 2), 8
    return simulate_attention(*asked, strategy=strategy, machine=MACHINE, **options)


@pytest.mark.parametrize("strategy", ["around", "direct", "all_gather"])
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.sliding(9)])
def test_tiles_and_packs_have_the_labels_of_rings(mask: Mask, strategy: str) -> None:
    plans = Ring(as_layout("zigzag"), 4, 96, mask, strategy=strategy).plans()
    seen: list[tuple[Any, ...]] = []

    def noted(label: Label, what: str) -> Any:
        seen.append((*label, what))
        return nullcontext()

    def attention(rank: int, transport: PlayedTransport) -> None:
        query, key, value, grad = (torch.ones(1, heads, 24, 8) for heads in (6, 2, 2, 6))
        plan, kernel, scores = plans[rank], Reference(), Scores(mask, 0.5)
        out, lse = ring_forward(query, (key, value), plan, kernel, scores, transport)
        saved = Saved(grad, out, lse)
        ring_backward(saved, query, (key, value), plan, kernel, scores, transport)

    with patch.object(Label, "__call__", noted):
        play(4, attention)
    found = simulated(strategy, mask, dtype=torch.float32)
    told = [LABEL.fullmatch(span.label).groups() for span in found.spans()]
    labels = Counter((ring, int(step), int(source), what) for ring, step, source, what in told)
    for what in ("tile", "pack"):
        expected = Counter(x for x in seen if x[3] == what)
        assert {x: n for x, n in labels.items() if x[3] == what} == expected
    assert {x[3] for x in labels} - {"message"} <= {x[3] for x in seen}


@pytest.mark.parametrize("strategy", ["ring", "ulysses:2", "ulysses"])
def test_spans_of_a_stream_follow_one_another_and_end_in_time(strategy: str) -> None:
    found = simulated(strategy, Mask.causal())
    spans = list(found.spans())
    for rank in range(4):
        for stream in STREAMS:
            mine = [x for x in spans if (x.rank, x.stream) == (rank, stream)]
            assert mine
            assert all(x.begin <= x.end for x in mine)
            # A port is free again before the last byte of a message has arrived.
            if stream in ("host", "compute"):
                assert all(one.end <= next.begin + 1e-12 for one, next in pairwise(mine))
    assert max(x.end for x in spans) == pytest.approx(sum(found.seconds))
    assert list(found.spans([1, 3])) == [x for x in spans if x.rank in (1, 3)]
    waits = [x.end - x.begin for x in spans if x.rank == 0 and "wait" in x.label]
    waited = [x.waited[0] for x in (found.forward, found.backward)]
    assert sum(waits) == pytest.approx(sum(waited))


def test_a_chrome_trace_has_all_spans_in_microseconds() -> None:
    found = simulated("ring", Mask.causal())
    events = json.loads(found.chrome_trace([2]))["traceEvents"]
    spans = list(found.spans([2]))
    drawn = [x for x in events if x["ph"] == "X"]
    assert [(x["name"], x["cat"], x["pid"]) for x in drawn] == [
        (x.label, x.stream, 2) for x in spans
    ]
    assert drawn[-1]["ts"] + drawn[-1]["dur"] == pytest.approx(1e6 * spans[-1].end)
    names = [x["args"]["name"] for x in events if x["ph"] == "M"]
    assert names == ["rank 2", *STREAMS]


def test_totals_written_out() -> None:
    """Two ranks, full mask, no kernel time: a hop forward; shards, sums and a wait backward."""
    still = round_machine(kernel=1e30)
    found = simulate_attention(Mask.full(), 8, 2, (1, 1), 4, machine=still, dtype=torch.float32)
    # 4 tokens of a key and a value of 4 numbers of 4 bytes: 128 bytes, 100 of them in a second.
    assert found.num_bytes == (128, 256)
    assert found.seconds == pytest.approx((2.28, 4.56))
    assert found.exposed == pytest.approx((2.28, 4.56))
    assert found.total == pytest.approx(6.84)
    assert str(found).splitlines()[1:] == [
        "forward    2280.000 ms,  2280.000 ms of it waiting for messages, 0.0 MB sent",
        "backward   4560.000 ms,  4560.000 ms of it waiting for messages, 0.0 MB sent",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "ulysses"}, "the strategy 'ulysses:8' cannot run this attention: 4 query"),
        ({"machine": "none"}, "machine 'none' is neither a file"),
        ({"dtype": torch.float64}, "machine round has no speed of kernel any for float64"),
        ({"layout": "zag"}, "unknown layout 'zag'"),
    ],
)
def test_what_cannot_be_simulated(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        simulate_attention(Mask.causal(), 64, 8, (4, 2), **{"machine": MACHINE, **options})


def test_a_misspelt_option_names_the_public_function() -> None:
    for function, option, meant in (
        (simulate_attention, "lay", "layout"),
        (simulate_attention, "strategies", "strategy"),
        (compare_strategies, "strategy", "strategies"),
    ):
        said = f"{function.__name__}() got an unexpected keyword argument {option!r}; did you mean"
        with pytest.raises(TypeError, match=re.escape(f"{said} {meant!r}?")):
            function(Mask.causal(), 64, 8, **{option: "ring"})


def test_more_pairs_than_are_counted() -> None:
    """Half of the tokens take a fourth of the time; more than 64 bits count is refused."""
    asked: dict[str, Any] = {"world_size": 8, "heads": (32, 8), "machine": MACHINE}
    most, half = (simulate_attention(Mask.causal(), 2**x, **asked).seconds[0] for x in (30, 29))
    assert most == pytest.approx(4 * half, rel=1e-3)
    with pytest.raises(
        ValueError, match=r"seq_len 2,147,483,648 .* than 4,611,686,018,427,387,904"
    ):
        simulate_attention(Mask.causal(), 2**31, **asked)


@pytest.mark.parametrize(
    ("mask", "bounds", "is_plain"),
    [
        (Mask.causal(), None, True),
        (Mask.sliding(9), None, False),
        (Mask.causal(), [0, 40, 96], False),
    ],
)
def test_a_kernel_without_windows_has_all_tiles_or_none(
    mask: Mask, bounds: list[int] | None, is_plain: bool
) -> None:
    """With a window or documents even the full tiles are those of the kernel that has windows."""
    fast = Curve.line(0.0, 1e12)
    plain = [KernelSpeed("plain", "bfloat16", 128, form, fast, fast) for form in FORMS[1:]]
    alone = replace(MACHINE, kernels=tuple(plain))
    mixed = replace(MACHINE, kernels=(*plain, *MACHINE.kernels))
    both, first, windowed = (
        simulate_attention(mask, 96, 4, (6, 2), 8, bounds, machine=machine).seconds
        for machine in (mixed, alone, MACHINE)
    )
    assert both == (first if is_plain else windowed)
    assert both != (windowed if is_plain else first)


# Recordings are replayed as clocks of each rank tell, and equal ranks are recorded once.

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
