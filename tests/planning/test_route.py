"""Routes: everybody gets what it needs in time, every sum of gradients comes home once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.route import ROUTES, AroundRoute, DirectRoute, Hop, Route
from tests.columns import indices_of
from tests.drawn import examples
from tests.planning.player import MakeRoute, played
from tests.planning.test_demand import Table, TableDemand, demand_of, table_of, tables
from tests.planning.written_out import HOPS
from tests.rings import Ring

CAUSAL, FULL = Mask.causal(), Mask.full()
EACH_ROUTE = pytest.mark.parametrize("make", ROUTES.values(), ids=list(ROUTES))


@EACH_ROUTE
@settings(deadline=None, max_examples=examples(60))
@given(tables())
@example(((Cols(),),))
def test_all_arrives_in_time_and_comes_home_once(make: MakeRoute, table: Table) -> None:
    for source, player in enumerate(played(make, TableDemand(table))):
        assert not player.passing, "no sum is left on the way"
        found = [(i, rank) for part in player.home for i, ranks in part.items() for rank in ranks]
        assert len({*found}) == len(found), "no gradient comes home twice"
        for ranks in (ranks for part in player.home for ranks in part.values()):
            distances = [(rank - source) % len(table) for rank in ranks]
            assert distances == sorted(distances), "sums add up in the order of the ring"
        seen = player.route.demand.seen_of(source)
        assert {*found} >= {(i, rank) for rank, cols in seen.items() for i in indices_of(cols)}
        assert player.route.sources[0] == source
        assert len(set(player.route.sources)) == len(player.route.sources)
        last = len(player.route.sources) - 1
        assert (player.route.shards(last), player.route.sums(0)) == (Hop(), Hop())


def route_of(route: Route) -> tuple[list[int], list[Hop], list[Hop]]:
    steps = range(len(route.sources))
    shards, sums = ([hop(step) for step in steps] for hop in (route.shards, route.sums))
    return list(route.sources), shards, sums


@EACH_ROUTE
@settings(deadline=None, max_examples=examples(60))
@given(tables())
@example(((Cols(),),))
def test_routes_are_those_written_out(make: MakeRoute, table: Table) -> None:
    demand = TableDemand(table)
    for rank in range(len(table)):
        route = make(rank, demand)
        assert route_of(route) == HOPS[type(route)](table, rank)


@given(tables())
def test_ring_is_the_lighter_route(table: Table) -> None:
    demand = TableDemand(table)
    expected = DirectRoute if demand.direct_is_lighter else AroundRoute
    assert type(ROUTES["ring"](0, demand)) is expected


def bare(hops: tuple[Hop, ...]) -> list[Hop]:
    """Without what the planner adds."""
    return [hop._replace(releases=()) for hop in hops]


WAYS = {
    "causal": (Ring(ZigZag(), 4, 64, CAUSAL), AroundRoute),
    "full": (Ring(Striped(), 4, 64, FULL), AroundRoute),
    "neighbours": (Ring(Contiguous(), 4, 64, Mask.sliding(3)), AroundRoute),
    "ends of chunks": (Ring(ZigZag(), 4, 64, Mask.sliding(3)), DirectRoute),
    "wide windows": (Ring(ZigZag(), 4, 64, Mask.sliding(7)), DirectRoute),
    "a fifth less": (Ring(ZigZag(), 4, 64, Mask.sliding(20)), DirectRoute),
    "a sixth less": (Ring(ZigZag(), 4, 64, Mask.sliding(22)), AroundRoute),
    "documents": (Ring(ZigZag(), 4, 64, CAUSAL, ((0, 11, 19, 27, 34, 43, 53, 60),)), DirectRoute),
    "documents, striped": (Ring(Striped(), 4, 64, CAUSAL, ((0, 11, 27, 43, 60),)), AroundRoute),
    "alone": (Ring(ZigZag(), 1, 64, CAUSAL), AroundRoute),
    "no token": (Ring(ZigZag(), 3, 0, FULL), AroundRoute),
}


@pytest.mark.parametrize(("ring", "kind"), WAYS.values(), ids=list(WAYS))
def test_the_route_that_moves_less(ring: Ring, kind: type[Route]) -> None:
    assert isinstance(ROUTES["ring"](0, demand_of(ring)), kind)
    name = {AroundRoute: "around", DirectRoute: "direct"}[kind]
    for chosen in (ring, replace(ring, strategy=name)):
        for found in chosen.plans():
            sources, shards, sums = HOPS[kind](table_of(ring), found.rank)
            assert [step.source for step in found.steps] == sources
            assert (bare(found.shards), list(found.sums)) == (shards, sums)


def test_unknown_routes_are_refused() -> None:
    message = f"unknown strategy 'gather'; known strategies: {', '.join(ROUTES)}, ulysses"
    with pytest.raises(ValueError, match=message):
        plan(Contiguous(), CAUSAL, 0, 2, 8, strategy="gather")
