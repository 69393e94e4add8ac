"""Routes: everybody gets what it needs in time, every sum of gradients comes home once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.route import ROUTES, DirectRoute, GatheredRoute, Hop, RingRoute, Route
from tests.columns import indices_of
from tests.planning.player import MakeRoute, played
from tests.planning.test_demand import Table, TableDemand, demand_of, table_of, tables
from tests.planning.written_out import around, gathered, straight
from tests.rings import Ring

CAUSAL, FULL = Mask.causal(), Mask.full()
EACH_ROUTE = pytest.mark.parametrize("make", ROUTES.values(), ids=list(ROUTES))


@EACH_ROUTE
@settings(deadline=None)
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
    shards, sums = ([mail(step) for step in steps] for mail in (route.shards, route.sums))
    return list(route.sources), shards, sums


@settings(deadline=None)
@given(tables())
@example(((Cols(),),))
def test_routes_are_those_written_out(table: Table) -> None:
    demand = TableDemand(table)
    for rank in range(len(table)):
        assert route_of(RingRoute(rank, demand)) == around(table, rank)
        assert route_of(DirectRoute(rank, demand)) == straight(table, rank)
        assert route_of(GatheredRoute(rank, demand)) == gathered(table, rank)
        expected = straight if demand.direct_is_lighter else around
        assert route_of(ROUTES["ring"](rank, demand)) == expected(table, rank)


def bare(hops: tuple[Hop, ...]) -> list[Hop]:
    """Without what the planner adds."""
    return [hop._replace(releases=()) for hop in hops]


WAYS = {
    "causal": (Ring(ZigZag(), 4, 64, CAUSAL), RingRoute),
    "full": (Ring(Striped(), 4, 64, FULL), RingRoute),
    "neighbours": (Ring(Contiguous(), 4, 64, Mask.sliding(3)), RingRoute),
    "ends of chunks": (Ring(ZigZag(), 4, 64, Mask.sliding(3)), DirectRoute),
    "wide windows": (Ring(ZigZag(), 4, 64, Mask.sliding(7)), DirectRoute),
    "a fifth less": (Ring(ZigZag(), 4, 64, Mask.sliding(20)), DirectRoute),
    "a sixth less": (Ring(ZigZag(), 4, 64, Mask.sliding(22)), RingRoute),
    "documents": (Ring(ZigZag(), 4, 64, CAUSAL, ((0, 11, 19, 27, 34, 43, 53, 60),)), DirectRoute),
    "documents, striped": (Ring(Striped(), 4, 64, CAUSAL, ((0, 11, 27, 43, 60),)), RingRoute),
    "alone": (Ring(ZigZag(), 1, 64, CAUSAL), RingRoute),
    "no token": (Ring(ZigZag(), 3, 0, FULL), RingRoute),
}


@pytest.mark.parametrize(("ring", "kind"), WAYS.values(), ids=list(WAYS))
def test_the_route_that_moves_less(ring: Ring, kind: type[Route]) -> None:
    assert isinstance(ROUTES["ring"](0, demand_of(ring)), kind)
    written = {RingRoute: around, DirectRoute: straight}[kind]
    for chosen in (ring, replace(ring, route={RingRoute: "around", DirectRoute: "direct"}[kind])):
        for found in chosen.plans():
            sources, shards, sums = written(table_of(ring), found.rank)
            assert [step.source for step in found.steps] == sources
            assert (bare(found.shards), list(found.sums)) == (shards, sums)


def test_unknown_routes_are_refused() -> None:
    message = "unknown strategy 'gather'; known strategies: ring, around, direct"
    with pytest.raises(ValueError, match=message):
        plan(Contiguous(), CAUSAL, 0, 2, 8, strategy="gather")
