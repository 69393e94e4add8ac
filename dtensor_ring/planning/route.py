"""Routes: which transfers happen at which hop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from dtensor_ring.planning.demand import Cols, Needs


class Transfer(NamedTuple):
    """Columns of a source's shard, or a sum of their gradients, that go to or come from a peer."""

    source: int
    cols: Cols
    peer: int


class Hop(NamedTuple):
    """The transfers of a rank at a hop.

    `releases` are the sources whose packets nobody needs on this rank once the hop is over. The
    planner fills them in.
    """

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    releases: tuple[int, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether there are messages."""
        return bool(self.sends or self.receives)


class Route(ABC):
    """How keys and values come to one rank, and gradients leave it.

    A new one is a class with these three methods and a row in `ROUTES`. Nothing else knows how
    messages travel: the loops post the hops that they are given.

    Hop i of the shards is posted before the kernels of step i, and waited for after them: what it
    receives serves the steps after i, and may be forwarded by the hops after i. At most one packet
    of a source comes to a rank. Hop i of the sums is posted when step i has added its gradients,
    after hop i of the shards was posted, and waited for before the next one is posted.

    Ranks make their steps on their own, but two ranks must agree on the order of all messages from
    one to the other, packets and sums: nothing else tells them apart. It is easiest if all ranks
    have the same steps, and a message is in the hop of one number on both sides.

    Args:
        rank: the rank whose messages these are.
        needs: what all ranks see of one another.
    """

    def __init__(self, rank: int, needs: Needs) -> None:
        self.rank, self.needs = rank, needs
        self.world_size = needs.world_size

    @property
    @abstractmethod
    def sources(self) -> Sequence[int]:
        """The rank whose shard each step computes on; the first is this rank itself."""

    @abstractmethod
    def shards(self, step: int) -> Hop:
        """The transfers while this step computes; none while the last one does.

        A source that is not this rank is a packet that came here, and goes on.
        """

    @abstractmethod
    def sums(self, step: int) -> Hop:
        """The transfers of sums after this step; none after the first.

        A sent sum is what came in for that source before, plus what the step on it has added. The
        sends of a step are together all of that, in parts that share no column.
        Receiving one of this rank is receiving gradients of its own tokens.
        """

    def _transfers(self, source: int, cols: Cols, peer: int) -> tuple[Transfer, ...]:
        """One transfer, or none if it were empty; ranks count around the ring."""
        source, peer = source % self.world_size, peer % self.world_size
        return (Transfer(source, cols, peer),) if cols else ()


class RingRoute(Route):
    """From neighbour to neighbour: what any rank further on sees of a shard travels together.

    A packet leaves columns behind that nobody further on sees, see `legs_of`. Every rank makes one
    step for each hop of the furthest packet, so some steps have no work.
    """

    @property
    def sources(self) -> Sequence[int]:
        # Those of the furthest packet of any rank, so that step numbers agree everywhere.
        num_hops = max((legs[-1].last for legs in self.needs.legs if legs), default=0)
        return [(self.rank - distance) % self.world_size for distance in range(num_hops + 1)]

    def shards(self, step: int) -> Hop:
        return Hop(self._passed(self.rank, step, 1), self._passed(self.rank - 1, step, -1))

    def sums(self, step: int) -> Hop:
        if not step:
            return Hop()
        # One hop after their shard. So a sum starts on the first rank after its source. Each rank
        # sends what goes no further to the source at once: it makes no more hops than the shard.
        sends, receives, _ = self.shards(step)
        sends += self._ended((self.rank - step) % self.world_size, step, -step)
        return Hop(sends, receives + self._ended(self.rank, step, step))

    def _passed(self, sender: int, step: int, by: int) -> tuple[Transfer, ...]:
        """The transfer to the next rank of the packet that `sender` computes on in this step."""
        source = (sender - step) % self.world_size
        # The next rank is one further from the source; nothing if the packet ends here.
        return self._transfers(source, self.needs.leg(source, step + 1).cols, self.rank + by)

    def _ended(self, source: int, step: int, by: int) -> tuple[Transfer, ...]:
        """The transfer of sums that end at this distance from their source."""
        leg = self.needs.leg(source, step)
        return self._transfers(source, leg.ending if leg.last == step else Cols(), self.rank + by)


class DirectRoute(Route):
    """Each rank gets from every source what it sees of it, and sends the sums straight back.

    All ranks make a step for each distance at which any rank sees anything, so some steps have no
    work. If each rank skipped its empty steps, two ranks might order a packet and a sum between
    them differently, and messages between two ranks are told apart by their order alone.
    """

    @cached_property
    def _seen(self) -> dict[int, Cols]:
        """Columns that this rank sees, by source."""
        return self.needs.seen_by(self.rank)

    @cached_property
    def _shown(self) -> dict[int, Cols]:
        """Columns of this rank's shard that others see, by rank."""
        return self.needs.seen_of(self.rank)

    @cached_property
    def _distances(self) -> list[int]:
        """By step: ranks back to the source, which are also the ranks ahead to the one served."""
        return [0, *self.needs.distances]

    @property
    def sources(self) -> Sequence[int]:
        return [(self.rank - distance) % self.world_size for distance in self._distances]

    def shards(self, step: int) -> Hop:
        # Nothing is forwarded: a packet travels during the step before the one that uses it.
        return self._exchanged(step + 1) if step + 1 < len(self._distances) else Hop()

    def sums(self, step: int) -> Hop:
        if not step:
            return Hop()
        # Gradients take the route of their shard in reverse.
        sends, receives, _ = self._exchanged(step)
        return Hop(receives, sends)

    def _exchanged(self, step: int) -> Hop:
        """Transfers at the distance of a step: to a rank that sees this shard, from a source."""
        distance = self._distances[step]
        source = (self.rank - distance) % self.world_size
        target = (self.rank + distance) % self.world_size
        # Both sides find the same columns, so sizes agree without a message about them.
        sends = self._transfers(self.rank, self._shown.get(target, Cols()), target)
        return Hop(sends, self._transfers(source, self._seen.get(source, Cols()), source))


class GatheredRoute(DirectRoute):
    """All that a rank sees of others comes while it works on its own shard.

    So only one hop has to be waited for. The steps after it have one source each, as on the other
    routes: in one step for all of them, what came would have to be copied together first, as each
    message lies in its own memory. Sums go straight home, each as soon as it is complete.
    """

    def shards(self, step: int) -> Hop:
        if step:
            return Hop()
        hops = [self._exchanged(number) for number in range(1, len(self._distances))]
        return Hop(
            tuple(x for hop in hops for x in hop.sends),
            tuple(x for hop in hops for x in hop.receives),
        )


def ring_unless_sparse(rank: int, needs: Needs) -> Route:
    """Around the ring, unless the load is less by more than a fifth if all goes directly.

    The load is what the busiest rank receives or sends, plus what a rank does in the mean. Where
    each rank has a link of its own, all wait for the busiest; where ranks share the network, for
    all messages together. A route may have little of the one and much of the other, so both count.

    A fifth must be saved: around the ring, every link between neighbours carries one message at a
    time, whatever the network looks like, and two buffers do, where packets stay whole. The direct
    route takes three, to send, to receive and to work on. Backward takes as many on both routes. A
    causal mask on a zigzag layout saves an eighth. But what few ranks see need not pass all the
    others: the ends of a zigzag layout's chunks that a sliding window reaches, say, or a document.
    """
    return (DirectRoute if needs.direct_is_lighter else RingRoute)(rank, needs)


ROUTES: dict[str, Callable[[int, Needs], Route]] = {
    "ring": ring_unless_sparse,
    "around": RingRoute,
    "direct": DirectRoute,
    "all_gather": GatheredRoute,
}
"""Factories of routes, by their names in the spelling of a strategy."""
