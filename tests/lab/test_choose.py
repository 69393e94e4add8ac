"""The strategy that takes least time: which it is, and what a faster link does to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Mask, Slices, TransferPolicy
from dtensor_ring.lab.choose import choose, chosen_strategy
from dtensor_ring.lab.machine import Curve, Machine
from dtensor_ring.lab.simulated_attention import simulate_attention
from dtensor_ring.planning.strategy import Strategy, every_strategy, why_not
from tests.lab.machines import links, round_machine

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
