"""Routes: which transfers happen at which hop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from dtensor_ring.planning.demand import Cols, KeyDemand


class Transfer(NamedTuple):
    """Columns of a source's shard, or sums of their gradients, sent to or received from a peer."""

    source: int
    cols: Cols
    peer: int


class Hop(NamedTuple):
    """The transfers of a rank at a hop.

    `releases` are the sources whose packets this rank no longer needs after the hop. The planner
    fills them in.
    """

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    releases: tuple[int, ...] = ()


class Route(ABC):
    """How one rank receives keys and values, and sends gradients back.

    A new route is a class with these three members and a row in `ROUTES`. Loops and transport know
    of no route: they post the hops that they are given. The ring goes from each rank to the next
    one, and distances count that way: a route in another direction counts its own.

    Hop i of the shards is posted before the kernels of step i, and waited for after them: what it
    receives serves the steps after i, and the hops after i may forward it. A hop may be empty. A
    packet that arrives early keeps a buffer until its step. A rank receives at most one packet of a
    source. Hop i of the sums is posted when step i has added its gradients, after
    hop i of the shards was posted, and waited for before the next one is posted.

    Each rank runs its steps independently, but two ranks must agree on the order of all messages
    between them, packets and sums, because only the order identifies a message. The simplest way
    is that all ranks have the same steps, and a message has the same hop number on both sides.

    Args:
        rank: the rank whose messages these are.
        demand: what all ranks see of one another.
    """

    def __init__(self, rank: int, demand: KeyDemand) -> None:
        self.rank, self.demand = rank, demand
        self.world_size = demand.world_size

    @property
    @abstractmethod
    def sources(self) -> Sequence[int]:
        """The rank whose shard each step computes on; the first is this rank."""

    @abstractmethod
    def shards(self, step: int) -> Hop:
        """Return the transfers of keys and values during this step; the last step has none.

        A send with another source than this rank forwards a packet received before.
        """

    @abstractmethod
    def sums(self, step: int) -> Hop:
        """Return the transfers of sums after this step; the first step has none.

        A sent sum is the sum received for that source, plus what this rank's step added. The sends
        of a step cover the whole sum, in parts without a common column. A received sum whose
        source is this rank holds gradients of its own tokens.
        """

    def _transfers(self, source: int, cols: Cols, peer: int) -> tuple[Transfer, ...]:
        """Return one transfer, or none without columns; rank numbers wrap around the ring."""
        source, peer = source % self.world_size, peer % self.world_size
        return (Transfer(source, cols, peer),) if cols else ()


# Three ranks, full mask. 0>1: rank 1 receives the shard of rank 0. Hop i is posted before the
# kernels of step i; step i + 1 uses what it brings.
#                   hop 0              hop 1
#     around        0>1 1>2 2>0        2>1 0>2 1>0    rank 0 forwards the shard of rank 2
#     direct        0>1 1>2 2>0        0>2 1>0 2>1    each rank sends its own shard only
#     all_gather    both of direct     none
class AroundRoute(Route):
    """Each packet travels from rank to next rank, with all columns that later ranks see.

    Later ranks are those further from the source. At each rank a packet drops the columns that no
    later rank sees: `KeyDemand.stages` has what it holds at each distance. Every rank has one step
    for each hop of the furthest packet, so some steps have no work.
    """

    @property
    def sources(self) -> Sequence[int]:
        # Count the hops of the furthest packet of any rank, so step numbers agree on all ranks.
        num_hops = max((stages[-1].last for stages in self.demand.stages if stages), default=0)
        return [(self.rank - distance) % self.world_size for distance in range(num_hops + 1)]

    def shards(self, step: int) -> Hop:
        return Hop(self._passed(self.rank, step, 1), self._passed(self.rank - 1, step, -1))

    def sums(self, step: int) -> Hop:
        if not step:
            return Hop()
        # Sums follow their shard one hop later, starting on the first rank after the source.
        # The sums of columns that the packet drops here go directly back to the source.
        sends, receives, _ = self.shards(step)
        sends += self._ended((self.rank - step) % self.world_size, step, -step)
        return Hop(sends, receives + self._ended(self.rank, step, step))

    def _passed(self, sender: int, step: int, by: int) -> tuple[Transfer, ...]:
        """Return the transfer that takes the packet of this step from `sender` to the next rank."""
        source = (sender - step) % self.world_size
        # The next rank is one hop further from the source. Without columns the packet ends here.
        return self._transfers(source, self.demand.stage(source, step + 1).cols, self.rank + by)

    def _ended(self, source: int, step: int, by: int) -> tuple[Transfer, ...]:
        """Return the transfer of sums whose columns travel no further than this step."""
        stage = self.demand.stage(source, step)
        return self._transfers(
            source, stage.ending if stage.last == step else Cols(), self.rank + by
        )


class DirectRoute(Route):
    """Each rank receives what it sees directly from every source, and sends the sums directly back.

    All ranks have a step for each distance at which any rank sees anything, so some steps have no
    work. If each rank skipped its empty steps, two ranks might order a packet and a sum between
    them differently, and only the order identifies a message between two ranks.
    """

    @cached_property
    def _visible_here(self) -> dict[int, Cols]:
        """Columns that this rank sees, by source."""
        return self.demand.seen_by(self.rank)

    @cached_property
    def _visible_to_others(self) -> dict[int, Cols]:
        """Columns of this rank's shard that others see, by rank."""
        return self.demand.seen_of(self.rank)

    @cached_property
    def _distances(self) -> list[int]:
        """Distance of each step: from the source to this rank, and from this rank to a receiver."""
        return [0, *self.demand.distances]

    @property
    def sources(self) -> Sequence[int]:
        return [(self.rank - distance) % self.world_size for distance in self._distances]

    def shards(self, step: int) -> Hop:
        # A packet is never forwarded: it travels during the step before the one that uses it.
        return self._direct_hop(step + 1) if step + 1 < len(self._distances) else Hop()

    def sums(self, step: int) -> Hop:
        if not step:
            return Hop()
        # Gradients take the route of their shard in reverse.
        sends, receives, _ = self._direct_hop(step)
        return Hop(receives, sends)

    def _direct_hop(self, step: int) -> Hop:
        """Return the transfers at the distance of a step: one to a receiver, one from a source."""
        distance = self._distances[step]
        source = (self.rank - distance) % self.world_size
        target = (self.rank + distance) % self.world_size
        # Both sides compute the same columns, so sizes agree without a message.
        sends = self._transfers(self.rank, self._visible_to_others.get(target, Cols()), target)
        return Hop(sends, self._transfers(source, self._visible_here.get(source, Cols()), source))


class AllGatherRoute(DirectRoute):
    """A rank receives all that it sees of other shards while it computes on its own.

    It waits for one hop only. The later steps have one source each, as on the other routes: a
    single step for all sources would first have to copy the messages into one buffer. Sums go
    directly back to their source, each as soon as it is complete.
    """

    def shards(self, step: int) -> Hop:
        if step:
            return Hop()
        # All hops are one, before the first step: later steps wait for nothing.
        hops = [self._direct_hop(number) for number in range(1, len(self._distances))]
        return Hop(
            tuple(x for hop in hops for x in hop.sends),
            tuple(x for hop in hops for x in hop.receives),
        )


def ring_unless_sparse(rank: int, demand: KeyDemand) -> Route:
    """Choose the route around the ring, unless the direct one saves more than a fifth of the load.

    The load is what the busiest rank receives or sends, plus the mean over ranks. If each rank has
    a link of its own, all ranks wait for the busiest; if ranks share the network, they wait for
    all messages together. A route may be light in one and heavy in the other, so both count.

    The direct route must save a fifth because it costs more otherwise. Around the ring, every link
    between neighbours carries one message at a time on any network, and two buffers are enough
    while packets stay whole. The direct route needs three: to send, to receive and to compute on.
    The backward pass needs the same number on both. A causal mask on a zigzag layout saves only an
    eighth. The direct route wins if few ranks see a column, as with a sliding window on a zigzag
    layout or with short documents.
    """
    return (DirectRoute if demand.direct_is_lighter else AroundRoute)(rank, demand)


# Factories of routes, by name as in the spec of a strategy. `ring` chooses between the next two.
ROUTES: dict[str, Callable[[int, KeyDemand], Route]] = {
    "ring": ring_unless_sparse,
    "around": AroundRoute,
    "direct": DirectRoute,
    "all_gather": AllGatherRoute,
}
