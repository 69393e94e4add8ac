"""Which way keys and values travel: around the ring, or straight to the ranks that see them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dtensor_ring.tile import NOTHING, Span, hull, length

Needs = tuple[tuple[Span, ...], ...]
"""By source, then by distance: columns of its shard that the rank so many ranks on sees.

A rank needs nothing of itself, at distance 0.
"""


class Parcel(NamedTuple):
    """Columns of a source's shard, or sums of their gradients, to a peer or from it."""

    source: int
    cols: Span
    peer: int


class Mail(NamedTuple):
    """What a rank sends and receives at a hop."""

    sends: tuple[Parcel, ...] = ()
    receives: tuple[Parcel, ...] = ()


@dataclass(frozen=True)
class Around:
    """From neighbour to neighbour: what any other rank sees of a shard travels together."""

    needs: Needs

    @cached_property
    def distances(self) -> tuple[int, ...]:
        """By step: how many ranks back the source is."""
        return tuple(range(1 + max(self._num_hops)))

    @cached_property
    def _num_hops(self) -> list[int]:
        """By source."""
        return [max((i for i, x in enumerate(row) if length(x)), default=0) for row in self.needs]

    @cached_property
    def _hulls(self) -> list[Span]:
        """By source: from the first column that another rank sees to the last."""
        return [hull(row) for row in self.needs]

    def held(self, source: int, distance: int) -> Span:
        """The columns that the rank so many ranks on receives."""
        return self._hulls[source] if 1 <= distance <= self._num_hops[source] else NOTHING

    def shards(self, rank: int, hop: int) -> Mail:
        """Keys and values, which come to be worked on in the step of the same number."""
        return Mail(self._passed(rank, hop, rank + 1), self._passed(rank - 1, hop, rank - 1))

    def sums(self, rank: int, step: int) -> Mail:
        """Sums of gradients, once a step has added to them, one hop behind their shards.

        A sum starts empty on the first rank after its source, and goes home in one send from the
        last rank that adds to it. So it makes no more hops than its shard.
        """
        sends, receives = self.shards(rank, step + 1)
        source = (rank - step) % len(self.needs)
        if self._num_hops[source] == step:
            sends += (Parcel(source, self._hulls[source], source),)
        if self._num_hops[rank] == step:
            receives += (Parcel(rank, self._hulls[rank], (rank + step) % len(self.needs)),)
        return Mail(sends, receives)

    def _passed(self, sender: int, hop: int, peer: int) -> tuple[Parcel, ...]:
        """What a rank passes on to the next one: it came with the hop before."""
        source = (sender - hop + 1) % len(self.needs)
        return _parcels(source, self.held(source, hop), peer % len(self.needs))


@dataclass(frozen=True)
class Direct:
    """Each rank gets from every source what it sees of it, and sends the sums straight back."""

    needs: Needs

    @cached_property
    def distances(self) -> tuple[int, ...]:
        """By step: how many ranks back the source is, for all at which a rank sees anything."""
        others = range(1, len(self.needs))
        return 0, *(i for i in others if any(length(row[i]) for row in self.needs))

    def held(self, source: int, distance: int) -> Span:
        """The columns that the rank so many ranks on receives."""
        return self.needs[source][distance]

    def shards(self, rank: int, hop: int) -> Mail:
        """Keys and values, which come to be worked on in the step of the same number."""
        distance = self.distances[hop]
        source, target = (rank - distance) % len(self.needs), (rank + distance) % len(self.needs)
        return Mail(
            _parcels(rank, self.held(rank, distance), target),
            _parcels(source, self.held(source, distance), source),
        )

    def sums(self, rank: int, step: int) -> Mail:
        """Shares of gradients, the way back."""
        sends, receives = self.shards(rank, step)
        return Mail(receives, sends)


Route = Around | Direct


def route(needs: Needs) -> Route:
    """Around the ring, unless the busiest rank moves less than half as much if it goes straight.

    Around, every link between neighbours carries one message at a time, whatever the network looks
    like. But what few ranks see need not pass all the others: the ends of a zigzag layout's chunks
    that a sliding window reaches, say, or that a document does. Straight takes three buffers, to
    send, to receive and to work on, where the ring's two do all: more only where the largest parcel
    is more than two thirds of a shard. Backward takes as many either way.
    """
    around, direct = Around(needs), Direct(needs)
    return direct if 2 * _busiest(direct) < _busiest(around) else around


def _parcels(source: int, cols: Span, peer: int) -> tuple[Parcel, ...]:
    """One parcel, or none if it were empty."""
    return (Parcel(source, cols, peer),) if length(cols) else ()


def _busiest(way: Route) -> int:
    """Columns that a rank sends, or receives, at most."""
    ranks, hops = range(len(way.needs)), range(1, len(way.distances))
    mails = [[way.shards(rank, hop) for hop in hops] for rank in ranks]
    return max(
        sum(length(parcel.cols) for mail in mine for parcel in mail[side])
        for mine in mails
        for side in (0, 1)
    )
