"""Ranks that follow their routes, played in one process."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dtensor_ring.planning.demand import Cols, KeyDemand
from dtensor_ring.planning.route import Hop, Route, Transfer
from tests.columns import indices_of, union

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
