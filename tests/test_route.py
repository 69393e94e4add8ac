"""Routes: everybody gets what it needs in time, every share of a gradient comes home once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.plan import Plan
from dtensor_ring.route import Around, Direct, Mail, Needs, Parcel, Route, route
from dtensor_ring.tile import NOTHING, hull, length
from tests.rings import Ring
from tests.test_plan import cross_rings, rings

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
    queries, keys = ([ring.positions(rank, of_keys) for rank in ranks] for of_keys in (False, True))

    def needed(source: int, distance: int) -> tuple[int, int]:
        rows = seen[queries[(source + distance) % ring.world_size]]
        cols = rows[:, keys[source]].any(0).nonzero()[:, 0].tolist()
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


@settings(deadline=None, max_examples=200)
@given(rings() | cross_rings())
def test_nothing_moves_that_nobody_sees(ring: Ring) -> None:
    plans, ranks = ring.plans(), range(ring.world_size)
    for source, needed in enumerate(needs_of(ring)):
        cols = [
            {x.cols for x in plans[(source + i) % ring.world_size].steps[1:] if x.source == source}
            for i in ranks
        ]
        held = [hull(spans) for spans in cols]
        assert hull(held) == hull(needed), f"of source {source}, all that others see and no more"
        if ring.goes_straight:
            assert held == list(needed), f"of source {source}, what each of them sees"
        furthest = [max((i for i in ranks if length(x[i])), default=0) for x in (held, needed)]
        assert furthest[0] == furthest[1], f"source {source} goes as far as it is seen"
    for schedule in plans:
        assert schedule.num_steps == plans[0].num_steps
        check_steps(schedule, len(ring.positions(schedule.rank, of_keys=True)))


def check_steps(schedule: Plan, num_local: int) -> None:
    first, *others = schedule.steps
    assert (first.source, first.cols) == (schedule.rank, (0, num_local))
    assert schedule.shards[0] == schedule.shards[-1] == Mail(), "nothing behind the last step"
    for hop, step in enumerate(others, start=1):
        arriving = [(x.source, x.cols) for x in schedule.shards[hop].receives]
        assert arriving == ([(step.source, step.cols)] if length(step.cols) else []), f"hop {hop}"
        assert arriving or not step.tiles, f"step {hop} needs a shard that does not arrive"


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
    sources = [x.source for plan in plans for mail in plan.shards for x in mail.receives]
    assert [sources.count(rank) for rank in range(ring.world_size)] == num_hops
    assert plans[0].num_steps == 1 + max(num_hops)


def test_only_columns_that_others_see_travel() -> None:
    def travelling(ring: Ring) -> list[set[tuple[int, int]]]:
        parcels = [x for plan in ring.plans() for mail in plan.shards for x in mail.sends]
        return [{x.cols for x in parcels if x.source == rank} for rank in range(ring.world_size)]

    first, *others = travelling(Ring(ZigZag(), 4, 64, CAUSAL))
    assert first == {(0, 8)}, "the last chunk is seen by its owner alone"
    assert others == [{(0, 16)}] * 3
    assert travelling(Ring(Contiguous(), 4, 64, Mask.sliding(5))) == [{(11, 16)}] * 3 + [set()]


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
