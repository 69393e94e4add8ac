"""Strategies and layouts by what they cost: the table, and which takes least time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Mask, Slices, TransferPolicy, choose_layout, compare_strategies
from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.compute.execute import launches
from dtensor_ring.lab import comparison
from dtensor_ring.lab.choose import choose, chosen_strategy
from dtensor_ring.lab.comparison import StrategyCost
from dtensor_ring.lab.machine import Curve, Machine
from dtensor_ring.lab.problem import TensorSizes
from dtensor_ring.lab.recorded import RankAttention, by_field
from dtensor_ring.lab.simulated_attention import simulate_attention
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import Strategy, as_strategy, every_strategy, why_not
from tests.forced import machine_for
from tests.lab.machines import links, round_machine
from tests.rings import Ring

MASKS = {"causal": Mask.causal(), "window": Mask.sliding(100), "full": Mask.full()}
# A device of 600 TFLOP/s on links of 200 and 45 GB/s.
DEVICE = replace(
    round_machine(kernel=6e14),
    merge=Curve.line(3e-6, 2e12),
    pack=Curve.line(3e-6, 2e12),
    inside=links(1e-5, 2e11),
    between=links(2e-5, 4.5e10),
    ranks_per_host=4,
    beside_kernel=1.2,
    beside_transfer=1.1,
    launch=1e-5,
    hop=3e-5,
)
FREE = Curve((0.0,), (0.0,))


def faster(machine: Machine, by: float) -> Machine:
    """The machine with links of so many times the rate, and the same latency."""

    def of(curve: Curve) -> Curve:
        first = curve.seconds[0]
        return replace(curve, seconds=tuple(first + (x - first) / by for x in curve.seconds))

    inside, between = (
        replace(x, **{name: of(curve) for name, curve in vars(x).items()})
        for x in (machine.inside, machine.between)
    )
    return replace(machine, inside=inside, between=between)


@pytest.mark.pairs
@pytest.mark.parametrize("heads", [(8, 2), (3, 3)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_fastest_that_can_run_it(size: int, mask: str, heads: tuple[int, int]) -> None:
    asked = MASKS[mask], 4096 * size, size, heads
    able = [x for x in every_strategy(size) if why_not(x, *heads) is None]
    totals = [simulate_attention(*asked, strategy=x, machine=DEVICE).total for x in able]
    assert choose(*asked, machine=DEVICE) == able[totals.index(min(totals))]


def test_ties_go_to_the_first() -> None:
    asked = Mask.full(), 64, 4, (4, 4)
    still = replace(DEVICE, inside=links(0.0, 1e30), between=links(0.0, 1e30), hop=0.0, launch=0.0)
    still = replace(still, merge=FREE, pack=FREE, beside_kernel=1.0, beside_transfer=1.0)
    given = Strategy(4), Strategy(route="direct"), Strategy()
    assert choose(*asked, machine=still) == Strategy()
    assert choose(*asked, machine=still, strategies=given) == Strategy(4)


def test_what_no_strategy_can_run() -> None:
    given = Strategy(4), Strategy(8)
    with pytest.raises(ValueError, match="none of ulysses:4, ulysses:8 can run an attention of"):
        choose(Mask.full(), 64, 8, (2, 2), machine=DEVICE, strategies=given)


@pytest.mark.parametrize(
    "seen",
    [
        {"mask": Mask.causal()},
        {"mask": Mask.causal(), "cu_seqlens": (0, 300, 1024)},
        {"mask": None, "slices": Slices.prefix([0, 1024], 7)},
    ],
)
def test_a_second_call_finds_the_first(seen: dict[str, Any]) -> None:
    chosen_strategy.clear()
    found = [choose(seq_len=1024, world_size=4, machine=DEVICE, **seen) for _ in range(2)]
    assert found[0] is found[1]
    assert len(chosen_strategy) == 1
    choose(seq_len=1024, world_size=4, machine=faster(DEVICE, 2), **seen)
    assert len(chosen_strategy) == 2


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from(list(MASKS)),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([(8, 8), (8, 1)]),
    st.floats(1e-3, 1e3),
    st.floats(1.0, 1e3),
    st.booleans(),
)
def test_no_strategy_loses_time_by_a_faster_link(
    mask: str, size: int, heads: tuple[int, int], rate: float, by: float, waits: bool
) -> None:
    slow = replace(faster(DEVICE, rate), host_waits=waits)
    for strategy in every_strategy(size):
        asked = MASKS[mask], 1024 * size, size, heads
        before, after = (
            simulate_attention(*asked, strategy=strategy, machine=x)
            for x in (slow, faster(slow, by))
        )
        for one, other in zip(before.seconds, after.seconds, strict=True):
            assert other <= one * (1 + 1e-12)


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([(8, 8), (8, 4), (8, 1), (16, 1)]),
    st.floats(1e6, 1e12),
    st.floats(1.0, 1e3),
)
def test_a_faster_link_never_makes_more_bytes_lose(
    size: int, heads: tuple[int, int], rate: float, by: float
) -> None:
    """Where nothing hides messages, the lightest strategy wins, at any speed of the link."""
    bare = round_machine(kernel=1e30, merge=FREE, pack=FREE)
    bare = replace(bare, inside=links(0.0, rate))
    asked = Mask.full(), 240 * size, size, heads
    able = [x for x in every_strategy(size) if why_not(x, *heads) is None]
    totals = [sum(simulate_attention(*asked, strategy=x, machine=bare).num_bytes) for x in able]
    for machine in (bare, faster(bare, by)):
        chosen = choose(*asked, machine=machine)
        assert totals[able.index(chosen)] == min(totals)


def test_a_faster_link_may_make_hidden_bytes_lose() -> None:
    """A ring that hides its messages gains nothing by a faster link, and fewer launches win."""
    asked: Any = Mask.causal(), 16384, 4, (8, 2)
    options = {"policy": TransferPolicy(num_parts=2)}  # more of them leave a ring less to merge
    found = [choose(*asked, machine=faster(DEVICE, by), **options) for by in (0.2, 10.0)]
    assert [x.spec for x in found] == ["direct", "ulysses:4"]
    direct, ulysses = (
        simulate_attention(*asked, strategy=x, machine=DEVICE, **options) for x in found
    )
    assert sum(direct.num_bytes) > sum(ulysses.num_bytes)


def test_groups_whose_runs_interleave_are_left_out() -> None:
    """Counting their tiles would take minutes; only a list that names them has them tried."""
    asked = Mask.causal(), 2**14, 8, (8, 8)
    assert choose(*asked, layout="striped", machine=DEVICE).heads in (1, 8)
    short = Mask.causal(), 64, 8, (8, 8)
    assert choose(*short, layout="striped", machine=DEVICE, strategies=[Strategy(2)]) == Strategy(2)


# The layout that is chosen takes least time, as simulations of each layer say.

CAUSAL, WINDOW = Mask.causal(), Mask.sliding(7)
SIZES: dict[str, Any] = {"heads": (4, 2), "head_dim": 8, "dtype": "float32"}
FAST_LINKS = machine_for("ring")

CASES = {
    "causal": ([CAUSAL], "ring", "zigzag"),
    "full, a tie": ([Mask.full()], "ring", "contiguous"),
    "window": ([WINDOW], "ring", "contiguous"),
    "one causal layer of six": ([WINDOW] * 5 + [CAUSAL], "ring", "zigzag"),
    "each layer by its own strategy": ([WINDOW, CAUSAL], "auto", "zigzag"),
}


@pytest.mark.parametrize("name", CASES)
def test_least_time_of_all_layers(name: str) -> None:
    masks, strategy, expected = CASES[name]
    how: dict[str, Any] = SIZES | {"machine": FAST_LINKS}
    found = choose_layout(masks if len(masks) > 1 else masks[0], 250, 4, strategy=strategy, **how)
    assert found == expected
    of = {x: _total(masks, x, strategy, how) for x in ("contiguous", "zigzag")}
    assert of[found] <= min(of.values()) * (1 + 1e-6)


def _total(masks: Sequence[Mask], layout: str, strategy: str, how: dict[str, Any]) -> float:
    """Seconds of all layers, one by one, of the padded length."""
    total = 0.0
    for mask in masks:
        asked: tuple[Any, ...] = mask, 256, 4
        one: Any = choose(*asked, layout=layout, **how) if strategy == "auto" else strategy
        total += simulate_attention(*asked, layout=layout, strategy=one, **how).total
    return total


REFUSED = [
    (([], 256, 4), {}, ValueError, "there are none"),
    ((CAUSAL, 256, 0), {}, ValueError, "world_size"),
    ((CAUSAL, 256, 4), {"strategy": "tree"}, ValueError, "unknown strategy 'tree'"),
    ((CAUSAL, 256, 4), {"machine": "h1"}, ValueError, "neither a file that can be read"),
    ((CAUSAL, 256, 4), {"machine": 3}, TypeError, "machine must be"),
]


@pytest.mark.parametrize(("asked", "how", "error", "message"), REFUSED)
def test_refused(asked: Any, how: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_layout(*asked, **how)


# What strategies cost by the table, and why some cannot be.

MACHINE = round_machine()
DTYPES = (torch.float32,) * 3


@pytest.mark.parametrize("strategy", [*ROUTES, "ulysses:2", "ulysses:4"])
def test_a_row_is_of_the_busiest_rank(strategy: str) -> None:
    """`test_recorded.py` compares what one rank costs with what it sends and holds."""
    documents, layout = ((0, 5, 9, 21, 30, 46),), as_layout("zigzag")
    ring = Ring(layout, 4, 48, Mask.causal(), documents, strategy=strategy)
    heads, sizes = as_strategy(strategy, 4).heads, TensorSizes((8, 4), (4, 4), 2, *DTYPES)
    exchanges = [
        all_to_all_plan(layout, layout, heads, rank, 4, 48) if heads > 1 else None
        for rank in range(4)
    ]
    costs = [
        RankAttention(*both, sizes).costs() for both in zip(ring.plans(), exchanges, strict=True)
    ]
    asked = Mask.causal(), 48, 4, (8, 4), 4, documents
    (row,) = compare_strategies(*asked, batch=2, dtype=DTYPES[0], strategies=[strategy]).rows
    assert (row.forward, row.backward) == tuple(by_field(max, x) for x in zip(*costs, strict=True))
    tiles = [[tile for step in plan.steps for tile in step.tiles] for plan in ring.plans()]
    assert row.tiles == max(map(len, tiles))

    def of_rank(plan: Plan) -> int:
        shapes = [(2, plan.num_local[0], len(step.cols)) for step in plan.steps]
        return sum(len(launches(*x, True)) for x in zip(plan.steps, shapes, strict=True))

    assert row.launches == max(map(of_rank, ring.plans()))
    work = [sum(tile.area for tile in mine) for mine in tiles]
    assert row.balance == pytest.approx(max(work) * 4 / sum(work))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses:2", "ulysses"])
def test_memory_is_a_reason(strategy: str) -> None:
    """Of what is held forward and backward, the larger one decides, to the byte."""

    def cost(max_held: int | None) -> StrategyCost:
        asked = Mask.causal(), 64, 4, (4, 2), 8
        return compare_strategies(*asked, strategies=[strategy], max_held=max_held).rows[0]

    without = cost(None)
    most = max(without.forward.held, without.backward.held)
    assert cost(most) == without
    refused = cost(most - 1)
    assert replace(refused, why_not=None) == without
    assert refused.why_not is not None
    assert re.match("the busiest rank would hold .* MB backward, more than .*", refused.why_not)


def test_no_all_to_all_is_planned_without_ulysses() -> None:
    with patch.object(comparison, "all_to_all_plan", side_effect=AssertionError):
        found = compare_strategies(Mask.causal(), 64, 4, strategies=tuple(ROUTES))
    assert all(row.forward.sent for row in found.rows)


def test_what_cannot_be() -> None:
    found = compare_strategies(Mask.causal(), 64, 4, heads=(2, 1), strategies=("ring", "ulysses"))
    assert found.rows[0].why_not is None
    assert str(found).splitlines()[-1].startswith("ulysses:4  2 query heads cannot be sharded over")
    with pytest.raises(ValueError, match="do not divide the 4 of the axis"):
        compare_strategies(Mask.causal(), 64, 4, strategies=("ulysses:3",))


def test_seconds_of_a_machine_are_in_the_table() -> None:
    asked: Any = Mask.causal(), 48, 4, (6, 2), 4
    names = "ring", "all_gather", "ulysses:2", "ulysses"
    found = compare_strategies(*asked, strategies=names, machine=MACHINE)
    for row in found.rows[:3]:
        times = simulate_attention(*asked, strategy=row.strategy, machine=MACHINE)
        assert (row.seconds, row.exposed) == (times.seconds, times.exposed)
        assert times.num_bytes == (row.forward.sent, row.backward.sent)
    lines = str(found).splitlines()
    assert lines[0].split()[-1] == "milliseconds"
    assert lines[1].split()[-4:] == ["forward", "exposed", "backward", "exposed"]
    times = found.rows[0].seconds, found.rows[0].exposed
    shown = [f"{1e3 * x:.3f}" for both in zip(*times, strict=True) for x in both]
    assert lines[2].split()[-4:] == shown
    few = compare_strategies(*asked[:3], (2, 2), 4, strategies=("ulysses",), machine=MACHINE)
    assert few.rows[0].seconds is None
    assert "cannot be sharded" in str(few)
    assert "milliseconds" not in str(compare_strategies(*asked, strategies=names))
