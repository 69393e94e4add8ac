"""Routes: everybody gets what it needs in time, every sum of gradients comes home once."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings

from dtensor_ring import Balanced, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.planning.layouts.layout import Layout
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.planning.routes.columns import Cols
from dtensor_ring.planning.routes.needs import Needs
from dtensor_ring.planning.routes.route import (
    ROUTES,
    DirectRoute,
    GatheredRoute,
    Hop,
    RingRoute,
    Route,
    Transfer,
)
from dtensor_ring.planning.values.span import Span
from tests.columns import cols_of, indices_of, union
from tests.layouts import LAYOUTS
from tests.planning.routes.test_needs import (
    Table,
    TableNeeds,
    legs_written_out,
    needs_of,
    table_of,
    tables,
)
from tests.planning.test_plan import cross_rings, rings
from tests.rings import Ring, Rows

CAUSAL, FULL = Mask.causal(), Mask.full()
MakeRoute = Callable[[int, Needs], Route]
EACH_NAME = pytest.mark.parametrize("route", ROUTES)
EACH_ROUTE = pytest.mark.parametrize("make", ROUTES.values(), ids=list(ROUTES))


Sum = dict[int, tuple[int, ...]]
"""By column: the ranks whose gradients are in the sum, in the order in which they were added."""


@dataclass
class Message:
    """One side of a message."""

    transfer: Transfer
    is_incoming: bool
    content: tuple = ()
    is_there: bool = False


@dataclass
class Links:
    """Sends and receives that wait for their other side, by sender and receiver."""

    waiting: dict[tuple[int, int], deque[Message]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    num_events: int = 0

    def post(self, rank: int, hop: Hop, contents: list[tuple]) -> list[Message]:
        self.num_events += 1
        receives = [Message(x, True) for x in hop.receives]
        sends = [Message(x, False, y) for x, y in zip(hop.sends, contents, strict=True)]
        for message in receives:
            self.match(message, (message.transfer.peer, rank))
        for message in sends:
            self.match(message, (rank, message.transfer.peer))
        return receives + sends

    def match(self, message: Message, link: tuple[int, int]) -> None:
        waiting = self.waiting[link]
        if not waiting or waiting[0].is_incoming == message.is_incoming:
            waiting.append(message)
            return
        self.num_events += 1
        other = waiting.popleft()
        sent, received = (other, message) if message.is_incoming else (message, other)
        assert sent.transfer[:2] == received.transfer[:2] == sent.content[:2]
        received.content = sent.content
        sent.is_there = received.is_there = True


@dataclass
class Player:
    """A rank that follows its route through backward, which has the messages of forward too.

    A message arrives when both have posted it, as with NCCL: nothing is buffered, and messages
    from one rank to another keep their order.
    """

    route: Route
    resident: dict[int, Cols] = field(default_factory=dict)
    passing: dict[int, Sum] = field(default_factory=dict)
    """By source: for each column of the sum that is here, the ranks whose gradients are in it."""
    home: list[Sum] = field(default_factory=list)

    def play(self, links: Links) -> Iterator[None]:
        """Yields where it waits."""
        rank, sums = self.route.rank, []
        for step, source in enumerate(self.route.sources):
            hop = self.route.shards(step)
            self.check_sends(hop)
            posted = links.post(rank, hop, [(x.source, x.cols) for x in hop.sends])
            seen = self.route.needs.seen_by(rank).get(source, Cols())
            cols = self.resident.get(source, Cols())
            assert source == rank or union([cols, seen]) == cols, "all that is needed, in time"
            yield from self.wait(sums)
            sums = self.post_sums(step, source, links)
            yield from self.wait(posted)
        yield from self.wait(sums)

    def check_sends(self, hop: Hop) -> None:
        for source, cols, peer in hop.sends:
            assert peer != self.route.rank
            held = cols if source == self.route.rank else self.resident[source]
            assert cols
            assert union([held, cols]) == held, "it came with an earlier hop"

    def post_sums(self, step: int, source: int, links: Links) -> list[Message]:
        hop = self.route.sums(step)
        assert {x.source for x in hop.sends} <= {source}, "what it worked on"
        if not hop.sends:
            return links.post(self.route.rank, hop, [])
        columns = indices_of(self.resident[source])
        before = self.passing.pop(source, dict.fromkeys(columns, ()))
        assert list(before) == columns, "a sum has the columns of the packet"
        after = {i: (*ranks, self.route.rank) for i, ranks in before.items()}
        sent = sorted(i for x in hop.sends for i in indices_of(x.cols))
        assert sent == columns, "all of it goes on or home, each column once"
        parts = [{i: after[i] for i in indices_of(x.cols)} for x in hop.sends]
        contents = [(*x[:2], part) for x, part in zip(hop.sends, parts, strict=True)]
        return links.post(self.route.rank, hop, contents)

    def wait(self, posted: list[Message]) -> Iterator[None]:
        for message in posted:
            while not message.is_there:
                yield
            if message.is_incoming:
                self.take(*message.content)

    def take(self, source: int, cols: Cols, part: Sum | None = None) -> None:
        if part is None:
            assert source not in self.resident, "at most one packet of a source"
            assert source != self.route.rank
            self.resident[source] = cols
        elif source == self.route.rank:
            self.home.append(part)
        else:
            assert source not in self.passing, "one sum of a source at a time"
            self.passing[source] = part


def played(make: MakeRoute, needs: Needs) -> list[Player]:
    """All ranks, after backward."""
    players = [Player(make(rank, needs)) for rank in range(needs.world_size)]
    links = Links()
    running = [player.play(links) for player in players]
    while running:
        num_before = links.num_events, len(running)
        running = [play for play in running if next(play, links) is None]
        assert (links.num_events, len(running)) != num_before, "ranks wait for one another"
    assert not any(links.waiting.values()), "no message without its other side"
    return players


@EACH_ROUTE
@settings(deadline=None)
@given(tables())
@example(((Cols(),),))
def test_all_arrives_in_time_and_comes_home_once(make: MakeRoute, table: Table) -> None:
    for source, player in enumerate(played(make, TableNeeds(table))):
        assert not player.passing, "no sum is left on the way"
        found = [(i, rank) for part in player.home for i, ranks in part.items() for rank in ranks]
        assert len({*found}) == len(found), "no gradient comes home twice"
        for ranks in (ranks for part in player.home for ranks in part.values()):
            distances = [(rank - source) % len(table) for rank in ranks]
            assert distances == sorted(distances), "sums add up in the order of the ring"
        seen = player.route.needs.seen_of(source)
        assert {*found} >= {(i, rank) for rank, cols in seen.items() for i in indices_of(cols)}
        assert player.route.sources[0] == source
        assert len(set(player.route.sources)) == len(player.route.sources)
        last = len(player.route.sources) - 1
        assert (player.route.shards(last), player.route.sums(0)) == (Hop(), Hop())


def around(table: Table, rank: int) -> tuple[list[int], list[Hop], list[Hop]]:
    """Sources, and hops of shards and sums, of a rank of a ring, written out from the table."""
    size = len(table)
    held = [[*legs_written_out(row), Cols()] for row in table]
    reach = max((i for row in held for i, cols in enumerate(row) if cols), default=0)
    sources, shards, sums = [(rank - i) % size for i in range(1 + reach)], [], []
    before, after = (rank - 1) % size, (rank + 1) % size
    for step, source in enumerate(sources):
        coming = (rank - 1 - step) % size
        passed = [Transfer(source, held[source][step + 1], after)]
        received = [Transfer(coming, held[coming][step + 1], before)]
        shards.append(hop_of(passed, received))
        # What is not passed on goes home.
        passed.append(Transfer(source, left_behind(held[source], step), source))
        received.append(Transfer(rank, left_behind(held[rank], step), (rank + step) % size))
        sums.append(hop_of(passed, received) if step else Hop())
    return sources, shards, sums


def left_behind(held: list[Cols], distance: int) -> Cols:
    """Columns that a packet holds at that distance, and no longer afterwards."""
    return cols_of({*indices_of(held[distance])} - {*indices_of(held[distance + 1])})


def hop_of(sends: list[Transfer], receives: list[Transfer]) -> Hop:
    """Nothing empty travels."""
    return Hop(*(tuple(x for x in side if x.cols) for side in (sends, receives)))


def straight(table: Table, rank: int) -> tuple[list[int], list[Hop], list[Hop]]:
    """The same of a rank that gets everything from its source."""
    sources, shards, sums = [rank], [], [Hop()]
    for distance in range(1, len(table)):
        source, target = (rank - distance) % len(table), (rank + distance) % len(table)
        sends = [Transfer(rank, table[rank][distance], target)]
        receives = [Transfer(source, table[source][distance], source)]
        hop = hop_of(sends, receives)
        if any(row[distance] for row in table):
            sources.append(source)
            shards.append(hop)
            sums.append(Hop(hop.receives, hop.sends))
    return sources, [*shards, Hop()], sums


def gathered(table: Table, rank: int) -> tuple[list[int], list[Hop], list[Hop]]:
    """The same of a rank that gets everything at once."""
    sources, shards, sums = straight(table, rank)
    at_once = Hop(*(sum((hop[side] for hop in shards), ()) for side in (0, 1)))
    return sources, [at_once, *(Hop() for _ in shards[1:])], sums


def route_of(route: Route) -> tuple[list[int], list[Hop], list[Hop]]:
    steps = range(len(route.sources))
    shards, sums = ([mail(step) for step in steps] for mail in (route.shards, route.sums))
    return list(route.sources), shards, sums


@settings(deadline=None)
@given(tables())
@example(((Cols(),),))
def test_routes_are_those_written_out(table: Table) -> None:
    needs = TableNeeds(table)
    for rank in range(len(table)):
        assert route_of(RingRoute(rank, needs)) == around(table, rank)
        assert route_of(DirectRoute(rank, needs)) == straight(table, rank)
        assert route_of(GatheredRoute(rank, needs)) == gathered(table, rank)
        expected = straight if needs.direct_is_lighter else around
        assert route_of(ROUTES["ring"](rank, needs)) == expected(table, rank)


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
    assert isinstance(ROUTES["ring"](0, needs_of(ring)), kind)
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


@EACH_NAME
@settings(deadline=None, max_examples=100)
@given(rings() | cross_rings())
def test_nothing_moves_that_nobody_sees(route: str, ring: Ring) -> None:
    plans, ranks = replace(ring, route=route).plans(), range(ring.world_size)
    for source, needed in enumerate(table_of(ring)):
        after = [plans[(source + i) % ring.world_size] for i in ranks]
        held = [Cols()] * ring.world_size
        for i, found in enumerate(after):
            (held[i],) = {x.cols for x in found.steps[1:] if x.source == source} or {Cols()}
        expected = list(needed) if is_straight(plans) else legs_written_out(needed)
        assert held == expected, f"of source {source}"
    for schedule in plans:
        assert schedule.num_steps == plans[0].num_steps
        check_steps(schedule, len(ring.positions(schedule.rank, of_keys=True)))
        check_releases(schedule)


def is_straight(plans: list[Plan]) -> bool:
    transfers = [(plan.rank, x) for plan in plans for hop in plan.shards for x in hop.sends]
    return any(x.peer != (rank + 1) % len(plans) for rank, x in transfers)


def check_steps(schedule: Plan, num_local: int) -> None:
    first = schedule.steps[0]
    assert (first.source, first.cols) == (schedule.rank, Cols.union([(0, num_local)]))
    assert len(schedule.shards) == len(schedule.sums) == schedule.num_steps
    assert schedule.shards[-1] == schedule.sums[0] == Hop()
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


MASKS = [
    CAUSAL,
    FULL,
    *(Mask.sliding(5), Mask.local(2, 3), Mask.chunked(12), Mask.prefix_causal(7)),
]
BATCHES = {
    "one document": None,
    "documents": ((0, 5, 11, 30, 31, 44, 48),),
    "rows": ((0, 5, 11, 30, 31, 44, 48), (0, 16, 17, 20, 40, 41, 43)),
}


@pytest.mark.parametrize("documents", BATCHES.values(), ids=list(BATCHES))
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, None], ids=lambda x: x.spec if x else "balanced")
def test_keys_that_come_are_those_that_are_seen(
    layout: Layout | None, mask: Mask, documents: Rows | None
) -> None:
    """Directly, each rank gets what it sees; around, what it or any rank further on sees.

    Around, a seventh more may come along.
    """
    for world_size in (3, 4):
        dealt = layout or Balanced(mask, 48, world_size, documents, 4)
        ring = Ring(dealt, world_size, 48, mask, documents)
        seen, ranks = ring.visible().any(0), range(world_size)
        positions = [ring.positions(rank) for rank in ranks]
        sees = [set(seen[rows].any(0).nonzero()[:, 0].tolist()) for rows in positions]
        for rank, found in enumerate(replace(ring, route="direct").plans()):
            assert received(ring, found) == sorted(sees[rank] - set(positions[rank].tolist()))
        for rank, found in enumerate(replace(ring, route="around").plans()):
            least, most = set(), set()
            for source in {*ranks} - {rank}:
                own = set(positions[source].tolist())
                # From this rank on to the one before the source.
                after = range(rank, rank + (source - rank) % world_size)
                later = own & set().union(*(sees[i % world_size] for i in after))
                least |= later
                most |= own if later else set()
            came = received(ring, found)
            assert least <= {*came} <= most
            assert 7 * len(came) <= 8 * len(least)


def received(ring: Ring, plan: Plan) -> list[int]:
    """Positions of all tokens that come to a rank."""
    transfers = [x for hop in plan.shards for x in hop.receives]
    assert plan.num_received == sum(len(x.cols) for x in transfers)
    return sorted(
        position
        for x in transfers
        for position in ring.positions(x.source)[indices_of(x.cols)].tolist()
    )


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


def test_only_columns_that_others_see_travel() -> None:
    def travelling(ring: Ring) -> list[set[tuple[Span, ...]]]:
        sent = [x for plan in ring.plans() for hop in plan.shards for x in hop.sends]
        return [{x.cols.spans for x in sent if x.source == rank} for rank in range(ring.world_size)]

    first, *others = travelling(Ring(ZigZag(), 4, 64, CAUSAL))
    assert first == {((0, 8),)}, "the last chunk is seen by its owner alone"
    assert others == [{((0, 16),)}] * 3
    assert travelling(Ring(Contiguous(), 4, 64, Mask.sliding(5))) == [{((11, 16),)}] * 3 + [set()]


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_packets_stay_whole_where_all_see_all(layout: Layout, mask: Mask) -> None:
    """No copy and no message more than a ring has."""
    for world_size in (2, 3, 8):
        ring = Ring(layout, world_size, 96 * world_size, mask)
        needs = needs_of(ring)
        assert {len(legs) for legs in needs.legs} <= {0, 1}
        assert not needs.direct_is_lighter


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
    left, right = Cols(((5, 8),)), Cols(((13, 16),))
    assert plan.shards == (
        Hop((Transfer(1, left, 2),), (Transfer(0, left, 0),)),
        Hop((Transfer(1, right, 0),), (Transfer(2, right, 2),), releases=(0,)),
        Hop(),
    )
    back = (Hop(hop.receives, hop.sends) for hop in plan.shards[:2])
    assert plan.sums == (Hop(), *back)
