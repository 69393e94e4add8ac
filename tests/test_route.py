"""Routes: everybody gets what it needs in time, every share of a gradient comes home once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.route import Around, Direct, Mail, Needs, Parcel, Route, route
from dtensor_ring.tile import NOTHING, hull, length
from tests.rings import Ring

CAUSAL, FULL = Mask.causal(), Mask.full()
ROUTES = pytest.mark.parametrize("kind", [Around, Direct])


@st.composite
def needs_of_rings(draw: st.DrawFn) -> Needs:
    world_size = draw(st.integers(1, 6))
    spans = st.just(NOTHING) | st.tuples(st.integers(0, 9), st.integers(1, 9)).map(
        lambda span: (span[0], span[0] + span[1])
    )
    others = st.lists(spans, min_size=world_size - 1, max_size=world_size - 1)
    rows = draw(st.lists(others, min_size=world_size, max_size=world_size))
    return tuple((NOTHING, *row) for row in rows)


def check_pairs(mails: list[Mail]) -> None:
    """What a rank sends to another is what that one receives from it, in the same order."""
    for rank, (sends, _) in enumerate(mails):
        assert all(length(parcel.cols) for parcel in sends), "no message is empty"
        for other, (_, receives) in enumerate(mails):
            sent = [(x.source, x.cols) for x in sends if x.peer == other]
            assert sent == [(x.source, x.cols) for x in receives if x.peer == rank]
            assert not sent or other != rank


@ROUTES
@given(needs_of_rings())
@example(((NOTHING,),))
def test_shards_arrive_in_time(kind: type[Route], needs: Needs) -> None:
    way, world_size = kind(needs), len(needs)
    ranks = range(world_size)
    has: list[tuple[int, tuple[int, int]] | None] = [None] * world_size
    for hop, distance in enumerate(way.distances[1:], start=1):
        mails = [way.shards(rank, hop) for rank in ranks]
        check_pairs(mails)
        for rank, (sends, receives) in enumerate(mails):
            assert len(sends) <= 1
            assert len(receives) <= 1
            for source, cols, _ in sends:
                assert source == rank or has[rank] == (source, cols), "it came with the last hop"
        has = [next((x[:2] for x in mail.receives), None) for mail in mails]
        for rank in ranks:
            source = (rank - distance) % world_size
            held = way.held(source, distance)
            assert has[rank] == ((source, held) if length(held) else None)
            assert hull([held, needs[source][distance]]) == held, "all that is needed"


@ROUTES
@given(needs_of_rings())
def test_every_share_comes_home_once(kind: type[Route], needs: Needs) -> None:
    way, ranks = kind(needs), range(len(needs))
    passing: list[Counter[int]] = [Counter() for _ in ranks]
    homes: list[Counter[int]] = [Counter() for _ in ranks]
    for step, distance in enumerate(way.distances[1:], start=1):
        mails = [way.sums(rank, step) for rank in ranks]
        check_pairs(mails)
        for rank, (sends, _) in enumerate(mails):
            assert len(sends) <= 1
            held = way.held((rank - distance) % len(needs), distance)
            assert [x.cols for x in sends] == ([held] if length(held) else []), "what it worked on"
            passing[rank][rank] += len(sends)
        arrived: list[Counter[int]] = [Counter() for _ in ranks]
        for rank, (_, receives) in enumerate(mails):
            for source, _, peer in receives:
                (homes if source == rank else arrived)[rank].update(passing[peer])
        passing = arrived
    assert not any(passing), "none is left on the way"
    for source, home in enumerate(homes):
        away = [i for i in ranks[1:] if length(way.held(source, i))]
        assert home == Counter((source + i) % len(needs) for i in away)


def needs_of(ring: Ring) -> Needs:
    """By what is visible."""
    seen, ranks = ring.visible().any(0), range(ring.world_size)
    positions = [ring.positions(rank) for rank in ranks]

    def needed(source: int, distance: int) -> tuple[int, int]:
        rows = seen[positions[(source + distance) % ring.world_size]]
        cols = rows[:, positions[source]].any(0).nonzero()[:, 0].tolist()
        return (cols[0], cols[-1] + 1) if cols and distance else NOTHING

    return tuple(tuple(needed(source, distance) for distance in ranks) for source in ranks)


WAYS = {
    "causal": (Ring(ZigZag(), 4, 64, CAUSAL), Around),
    "full": (Ring(Striped(), 4, 64, FULL), Around),
    "neighbours": (Ring(Contiguous(), 4, 64, Mask.sliding(3)), Around),
    "ends of chunks": (Ring(ZigZag(), 4, 64, Mask.sliding(3)), Direct),
    "wide windows": (Ring(ZigZag(), 4, 64, Mask.sliding(7)), Direct),
    "more than half": (Ring(ZigZag(), 4, 64, Mask.sliding(14)), Around),
    "documents": (Ring(ZigZag(), 4, 64, CAUSAL, ((0, 11, 19, 27, 34, 43, 53, 60),)), Direct),
    "documents, striped": (Ring(Striped(), 4, 64, CAUSAL, ((0, 11, 27, 43, 60),)), Around),
    "alone": (Ring(ZigZag(), 1, 64, CAUSAL), Around),
    "no token": (Ring(ZigZag(), 3, 0, FULL), Around),
}


@pytest.mark.parametrize(("ring", "kind"), WAYS.values(), ids=list(WAYS))
def test_the_way_that_moves_less(ring: Ring, kind: type[Route]) -> None:
    way = route(needs_of(ring))
    assert isinstance(way, kind)
    for plan in ring.plans():
        hops = range(1, plan.num_steps)
        assert plan.shards == (Mail(), *(way.shards(plan.rank, hop) for hop in hops), Mail())
        assert plan.sums == (Mail(), *(way.sums(plan.rank, hop) for hop in hops), Mail())


def test_a_window_costs_its_width() -> None:
    """Whatever the number of ranks and the length of the chunks."""
    for world_size in (4, 8, 16):
        plans = Ring(ZigZag(), world_size, 256 * world_size, Mask.sliding(20)).plans()
        assert {plan.num_steps for plan in plans} == {3}, "one more than neighbours"
        assert max(plan.num_received for plan in plans) == 2 * 20


def test_parcels_of_a_zigzag_window() -> None:
    """The ranks next to each other hold chunks next to each other: 0 and 7, 1 and 6, ..."""
    plan = Ring(ZigZag(), 4, 64, Mask.sliding(3)).plans()[1]
    assert [step.source for step in plan.steps] == [1, 0, 2]
    assert plan.shards[1:3] == (
        Mail((Parcel(1, (5, 8), 2),), (Parcel(0, (5, 8), 0),)),
        Mail((Parcel(1, (13, 16), 0),), (Parcel(2, (13, 16), 2),)),
    )
    assert plan.sums[1:3] == tuple(Mail(receives, sends) for sends, receives in plan.shards[1:3])
