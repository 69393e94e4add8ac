"""What strategies cost by the table, and why some cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dtensor_ring import Mask, compare_strategies
from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.compute.execute import launches
from dtensor_ring.lab import comparison
from dtensor_ring.lab.comparison import StrategyCost
from dtensor_ring.lab.problem import TensorSizes
from dtensor_ring.lab.recorded import RankAttention, by_field
from dtensor_ring.lab.simulated_attention import simulate_attention
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import as_strategy
from tests.lab.machines import round_machine
from tests.rings import Ring

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
