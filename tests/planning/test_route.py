"""Routes and strategies: all get what they see, on as few hops as it takes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.planning.demand import Cols, KeyDemand
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.planning.route import ROUTES, AroundRoute, DirectRoute, Hop, Route, Transfer
from dtensor_ring.planning.strategy import Strategy, as_strategy, check_strategy, why_not
from tests.columns import indices_of, union
from tests.drawn import examples
from tests.layouts import LAYOUTS
from tests.planning.test_demand import Table, TableDemand, demand_of, table_of, tables
from tests.planning.test_plan import cross_rings, rings
from tests.planning.written_out import COLUMNS, HOPS
from tests.rings import Ring

MakeRoute = Callable[[int, KeyDemand], Route]


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
            seen = self.route.demand.seen_by(rank).get(source, Cols())
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


def played(make: MakeRoute, demand: KeyDemand) -> list[Player]:
    """All ranks, after backward."""
    players = [Player(make(rank, demand)) for rank in range(demand.world_size)]
    links = Links()
    running = [player.play(links) for player in players]
    while running:
        num_before = links.num_events, len(running)
        running = [play for play in running if next(play, links) is None]
        assert (links.num_events, len(running)) != num_before, "ranks wait for one another"
    assert not any(links.waiting.values()), "no message without its other side"
    return players


# Routes and strategies: all get what they see, on as few hops as it takes.

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


# What travels: the keys that are seen, on as few hops as it takes.


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
NUM_HOPS = {
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


@pytest.mark.parametrize(("ring", "num_hops"), NUM_HOPS.values(), ids=list(NUM_HOPS))
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


# Strategies: their specs, and which attentions they can run.

SPECS = {
    **{name: Strategy(1, name) for name in ROUTES},
    "ulysses": Strategy(8),
    "ulysses:8": Strategy(8),
    "ulysses:1": Strategy(),
    "ulysses:4": Strategy(4),
    "ulysses:2+around": Strategy(2, "around"),
    "ulysses:4+all_gather": Strategy(4, "all_gather"),
    "ulysses+all_gather": Strategy(8),
    "ulysses:1+direct": Strategy(1, "direct"),
}
"""For an axis of 8 ranks."""


@pytest.mark.parametrize("spec", SPECS)
def test_specs(spec: str) -> None:
    found = as_strategy(spec, 8)
    assert found == SPECS[spec]
    assert as_strategy(found.spec, 8) == found
    check_strategy(spec)


UNKNOWN = ["", "tree", "ulysses:", "ulysses:0", "ulysses:-2", "ulysses:x", "ulysses:²", "ring+ring"]
UNKNOWN += ["ring:2", "ulysses:2+", "ulysses:2+tree", "ulysses:2+ring+ring", "Ulysses", "+ring"]


@pytest.mark.parametrize("spec", UNKNOWN)
def test_unknown_specs(spec: str) -> None:
    for check in (check_strategy, lambda spec: as_strategy(spec, 4)):
        with pytest.raises(ValueError, match=r"known strategies: ring, .*all_gather, ulysses"):
            check(spec)


@pytest.mark.parametrize("spec", [None, 4, b"ring"])
def test_what_is_no_spec(spec: object) -> None:
    with pytest.raises(TypeError, match=f"strategy must be a name, a str, got {spec!r}"):
        as_strategy(spec, 4)  # type: ignore[arg-type]


def test_groups_that_do_not_divide_the_axis() -> None:
    fitting = "do not divide the 6 of the axis; these do: ulysses:2, ulysses:3, ulysses:6"
    with pytest.raises(ValueError, match=fitting):
        as_strategy("ulysses:4", 6)
    with pytest.raises(ValueError, match="these do: ring"):
        as_strategy("ulysses:2", 1)


REASONS = {
    "ring": ((1, 4, 4), None),
    "as many as ranks": ((4, 4, 2), None),
    "one key head": ((4, 4, 1), None),
    "uneven": ((8, 28, 4), None),
    "too few": ((4, 3, 3), "3 query heads cannot be sharded over the 4 ranks of a group"),
}


@pytest.mark.parametrize("case", REASONS)
def test_why_not(case: str) -> None:
    (group, *heads), reason = REASONS[case]
    found = why_not(Strategy(group), *heads)
    assert found == reason or (reason and found and found.startswith(reason))
