"""What travels: the keys that are seen, on as few hops as it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.route import ROUTES, Hop
from tests.drawn import examples
from tests.layouts import LAYOUTS
from tests.planning.test_demand import demand_of, table_of
from tests.planning.test_plan import cross_rings, rings
from tests.planning.written_out import COLUMNS
from tests.rings import Ring

CAUSAL, FULL = Mask.causal(), Mask.full()


@pytest.mark.parametrize("route", ROUTES)
@settings(deadline=None, max_examples=examples(60))
@given(rings() | cross_rings())
def test_nothing_moves_that_nobody_sees(route: str, ring: Ring) -> None:
    plans, ranks = replace(ring, strategy=route).plans(), range(ring.world_size)
    columns_of = COLUMNS[type(ROUTES[route](0, demand_of(ring)))]
    for source, needed in enumerate(table_of(ring)):
        after = [plans[(source + i) % ring.world_size] for i in ranks]
        held = [Cols()] * ring.world_size
        for i, found in enumerate(after):
            (held[i],) = {x.cols for x in found.steps[1:] if x.source == source} or {Cols()}
        assert held == columns_of(needed), f"of source {source}"
    for schedule in plans:
        assert schedule.num_steps == plans[0].num_steps
        check_steps(schedule, len(ring.positions(schedule.rank, of_keys=True)))
        check_releases(schedule)


def check_steps(schedule: Plan, num_local: int) -> None:
    first = schedule.steps[0]
    assert (first.source, first.cols) == (schedule.rank, Cols.union([(0, num_local)]))
    assert len(schedule.shards) == len(schedule.sums) == schedule.num_steps
    assert schedule.shards[-1] == schedule.sums[0] == Hop()
    coming = [x for hop in schedule.shards for x in hop.receives]
    assert schedule.num_received == sum(len(x.cols) for x in coming)
    resident: dict[int, Cols] = {schedule.rank: Cols.union([(0, num_local)])}
    for number, (step, hop) in enumerate(zip(schedule.steps, schedule.shards, strict=True)):
        assert step.number == number
        assert step.cols == resident.get(step.source, Cols())
        assert step.cols or not step.tiles, f"step {number} needs what does not arrive"
        assert not resident.keys() & {x.source for x in hop.receives}, "one packet of a source"
        resident |= {x.source: x.cols for x in hop.receives}


def check_releases(schedule: Plan) -> None:
    """Once each, as soon as possible; what the last hop leaves goes with everything else."""
    released = [source for hop in schedule.shards for source in hop.releases]
    assert len(set(released)) == len(released)
    for source in {x.source for hop in schedule.shards for x in hop.receives}:
        users = [
            number
            for number, (step, hop) in enumerate(zip(schedule.steps, schedule.shards, strict=True))
            if source in [x.source for x in (*hop.sends, *hop.receives)]
            or (step.source == source and step.tiles)
        ]
        found = [i for i, hop in enumerate(schedule.shards) if source in hop.releases]
        assert found == ([users[-1]] if users[-1] < schedule.num_steps - 1 else [])
    assert schedule.rank not in released


WINDOW = Mask.sliding(1024)
SHORT_DOCUMENTS = (tuple(range(0, 64 * 256 + 1, 256)),)
HOPS = {
    "window": (Ring(Contiguous(), 4, 16384, WINDOW), [1, 1, 1, 0]),
    "documents": (Ring(Contiguous(), 4, 16384, CAUSAL, SHORT_DOCUMENTS), [0, 0, 0, 0]),
    "causal": (Ring(Contiguous(), 4, 16384, CAUSAL), [3, 2, 1, 0]),
    "full": (Ring(Contiguous(), 4, 16384, FULL), [3, 3, 3, 3]),
    "one ahead": (Ring(Contiguous(), 4, 16384, Mask.local(0, 1)), [0, 1, 1, 1]),
    "striped": (Ring(Striped(), 4, 16384, CAUSAL), [3, 3, 3, 3]),
    "striped, one back": (Ring(Striped(), 4, 16384, Mask.sliding(1)), [1, 1, 1, 1]),
    "zigzag": (Ring(ZigZag(), 4, 16384, CAUSAL), [3, 3, 3, 3]),
    "zigzag, documents": (Ring(ZigZag(), 4, 16384, CAUSAL, SHORT_DOCUMENTS), [0, 0, 0, 0]),
    "zigzag, one token each": (Ring(ZigZag(), 4, 4, CAUSAL), [3, 2, 1, 0]),
    "alone": (Ring(Contiguous(), 1, 64, CAUSAL), [0]),
    "striped alone": (Ring(Striped(), 1, 64, FULL), [0]),
    "zigzag alone": (Ring(ZigZag(), 1, 64, CAUSAL), [0]),
    "no token": (Ring(ZigZag(), 3, 0, FULL), [0, 0, 0]),
    "a chunk each": (Ring(Contiguous(), 4, 16384, Mask.chunked(4096)), [0, 0, 0, 0]),
    "chunks": (Ring(Contiguous(), 4, 16384, Mask.chunked(8192)), [1, 0, 1, 0]),
    "prefix": (Ring(Contiguous(), 4, 16384, Mask.prefix_causal(5000)), [3, 3, 1, 0]),
    "prefix in a window": (Ring(Contiguous(), 4, 64, Mask(4, 0, prefix=64)), [1, 3, 3, 3]),
    "cross": (Ring(Contiguous(), 4, 64, FULL, None, 8), [3, 3, 3, 3]),
    "cross, a document each": (
        Ring(Contiguous(), 4, 64, FULL, ((0, 16, 32, 48, 64),), 8, ((0, 2, 4, 6, 8),)),
        [0, 0, 0, 0],
    ),
}


@pytest.mark.parametrize(("ring", "num_hops"), HOPS.values(), ids=list(HOPS))
def test_hops(ring: Ring, num_hops: list[int]) -> None:
    plans = ring.plans()
    sources = [x.source for plan in plans for hop in plan.shards for x in hop.receives]
    assert [sources.count(rank) for rank in range(ring.world_size)] == num_hops
    assert plans[0].num_steps == 1 + max(num_hops)


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_packets_stay_whole_where_all_see_all(layout: Layout, mask: Mask) -> None:
    """No copy and no message more than a ring has."""
    for world_size in (2, 3, 8):
        ring = Ring(layout, world_size, 96 * world_size, mask)
        demand = demand_of(ring)
        assert {len(stages) for stages in demand.stages} <= {0, 1}
        assert not demand.direct_is_lighter


def test_a_window_costs_its_width() -> None:
    """Whatever the number of ranks and the length of the chunks."""
    for world_size in (4, 8, 16):
        plans = Ring(ZigZag(), world_size, 256 * world_size, Mask.sliding(20)).plans()
        assert {plan.num_steps for plan in plans} == {3}, "one more than neighbours"
        assert max(plan.num_received for plan in plans) == 2 * 20
