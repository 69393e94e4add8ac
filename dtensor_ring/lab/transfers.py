"""The hops of all ranks of a ring at once, as arrays: who sends how many columns to whom.

A plan has the hops of one rank as objects, and 1,024 plans take a minute. Here one array operation
makes a hop of all ranks. `tests/lab/test_transfers.py` compares both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import PlanInputs
from dtensor_ring.planning.route import ROUTES, AllGatherRoute, AroundRoute, DirectRoute, Hop, Route

# Odd constants of SplitMix64 (Steele et al., 2014, doi 10.1145/2660193.2660195).
GAMMA, FIRST, SECOND = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def mixed(*fields: np.ndarray) -> np.ndarray:
    """Return a uint64 for the fields of each row, which differs where any of them does.

    Two different rows get the same number by chance of 1 in 2**64.

    Args:
        fields: integers, of shapes that broadcast.
    """
    found = np.zeros((), dtype=np.uint64)
    for field in fields:
        found = (found ^ field.astype(np.uint64)) + GAMMA
        found = (found ^ (found >> np.uint64(30))) * FIRST
        found = (found ^ (found >> np.uint64(27))) * SECOND
        found = found ^ (found >> np.uint64(31))
    return found


class Messages(NamedTuple):
    """Messages of one hop, of which each rank sends and receives at most one: arrays `(M,)`.

    Attributes:
        senders, receivers: ranks.
        cols: number of columns, never 0.
        are_own: whether the columns are of the sender's shard.
        are_home: whether they are sums for the receiver's shard.
    """

    senders: np.ndarray
    receivers: np.ndarray
    cols: np.ndarray
    are_own: np.ndarray
    are_home: np.ndarray


class Packs(NamedTuple):
    """Packets that ranks copy before a hop, at most one of each rank: arrays `(M,)`.

    Attributes:
        ranks: who copies.
        cols: number of columns.
        are_own: whether the columns are of the rank's own shard.
        lie: whether they are contiguous there in a batch of one row, so that a large packet needs
            no copy.
    """

    ranks: np.ndarray
    cols: np.ndarray
    are_own: np.ndarray
    lie: np.ndarray


class RingHop(NamedTuple):
    """One hop of all ranks: what they copy, and then the messages, in their order."""

    packs: tuple[Packs, ...] = ()
    rounds: tuple[Messages, ...] = ()


class Resident(NamedTuple):
    """What all ranks compute on in a step: arrays `(W,)`.

    Attributes:
        sources: rank whose shard it is.
        cols: number of columns.
        contents: a number for the columns: equal columns have equal numbers.
    """

    sources: np.ndarray
    cols: np.ndarray
    contents: np.ndarray


class Transfers(ABC):
    """The hops of all ranks of a route, as in `Route`, and what is resident in each step.

    Args:
        inputs: what all ranks see of one another.
    """

    def __init__(self, inputs: PlanInputs) -> None:
        self.inputs, self.demand = inputs, inputs.demand
        self.world_size = self.demand.world_size
        self._ranks = np.arange(self.world_size)

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Number of steps of each rank."""

    @abstractmethod
    def shards(self, step: int) -> RingHop:
        """Return the hop of keys and values during this step."""

    @abstractmethod
    def sums(self, step: int) -> RingHop:
        """Return the hop of sums after this step."""

    @abstractmethod
    def resident(self, step: int) -> Resident:
        """Return what ranks compute on in this step; the first is their own shard."""

    @abstractmethod
    def resident_cols(self, step: int, rank: int) -> Cols:
        """Return the columns that a rank computes on in this step."""

    @abstractmethod
    def are_new(self, step: int) -> np.ndarray:
        """Return whether each rank begins the sum of this step's source, `(W,)`."""

    @abstractmethod
    def num_home(self) -> np.ndarray:
        """Return the number of sums for its own shard that each rank receives, `(W,)`."""

    @cached_property
    def _num_keys(self) -> np.ndarray:
        return np.array([self.inputs.keys.num_local(rank) for rank in range(self.world_size)])

    def _own(self) -> Resident:
        """Return the first step's: the whole shard of each rank."""
        contents = [content_of(self._whole(rank)) for rank in range(self.world_size)]
        return Resident(self._ranks, self._num_keys, np.array(contents, dtype=np.uint64))

    def _whole(self, rank: int) -> Cols:
        return Cols.union([(0, int(self._num_keys[rank]))])


def content_of(cols: Cols) -> int:
    """Return a number for columns: equal columns have equal numbers, others differ but by chance.

    It is one of 2**64, so a chance is one in 10**7 even for a million different ones.
    """
    return hash(cols.spans) % 2**64


def transfers_of(inputs: PlanInputs, route: str) -> Transfers:
    """Return the hops of all ranks.

    Args:
        inputs: what all ranks see of one another.
        route: a name in `ROUTES`.
    """
    kind = type(ROUTES[route](0, inputs.demand))
    known: dict[type[Route], type[Transfers]] = {
        AroundRoute: AroundTransfers,
        DirectRoute: DirectTransfers,
        AllGatherRoute: AllGatherTransfers,
    }
    if kind in known:
        return known[kind](inputs)
    return PlannedTransfers(inputs, route)


class AroundTransfers(Transfers):
    """All packets go from rank to next rank, see `AroundRoute`."""

    def __init__(self, inputs: PlanInputs) -> None:
        super().__init__(inputs)
        stages = self.demand.stages
        self._num_hops = max((x[-1].last for x in stages if x), default=0)
        # By distance and source: columns of the packet, their content, and those that end there.
        shape = self._num_hops + 2, self.world_size
        self._cols, self._ending = np.zeros((2, *shape), dtype=np.int64)
        self._contents = np.zeros(shape, dtype=np.uint64)
        self._lie = np.zeros(self.world_size, dtype=bool)
        for source, parts in enumerate(stages):
            first = 1
            for stage in parts:
                where = slice(first, stage.last + 1), source
                self._cols[where], self._contents[where] = len(stage.cols), content_of(stage.cols)
                self._ending[stage.last, source] = len(stage.ending)
                first = stage.last + 1
            self._lie[source] = bool(parts) and len(parts[0].cols.spans) == 1

    @property
    def num_steps(self) -> int:
        return self._num_hops + 1

    def shards(self, step: int) -> RingHop:
        passed = self._passed(step, are_own=not step)
        if not len(passed.senders):
            return RingHop()
        senders = passed.senders
        sources = (senders - step) % self.world_size
        if not step:
            own = np.ones(len(senders), dtype=bool)
            return RingHop((Packs(senders, passed.cols, own, self._lie[senders]),), (passed,))
        # A packet that loses columns here is copied, as its buffer holds the others.
        is_less = self._contents[step + 1, sources] != self._contents[step, sources]
        return RingHop(_packs(senders[is_less], passed.cols[is_less]), (passed,))

    def sums(self, step: int) -> RingHop:
        if not step:
            return RingHop()
        sources = (self._ranks - step) % self.world_size
        ending = self._ending[step, sources]
        passed, ended = self._passed(step, are_own=False), np.flatnonzero(ending)
        home = _messages(ended, sources[ended], ending[ended], are_home=True)
        # A sum that leaves in two parts is copied, part by part.
        parts = [(passed.senders, passed.cols), (ended, ending[ended])]
        is_cut = (self._cols[step + 1, sources] > 0) & (ending > 0)
        packs = [x for of in parts for x in _packs(*(y[is_cut[of[0]]] for y in of))]
        return RingHop(tuple(packs), tuple(x for x in (passed, home) if len(x.senders)))

    def _passed(self, step: int, are_own: bool) -> Messages:
        """Return the messages to the next rank."""
        cols = self._cols[step + 1, (self._ranks - step) % self.world_size]
        senders = np.flatnonzero(cols)
        receivers = (senders + 1) % self.world_size
        return _messages(senders, receivers, cols[senders], are_own)

    def resident(self, step: int) -> Resident:
        if not step:
            return self._own()
        sources = (self._ranks - step) % self.world_size
        return Resident(sources, self._cols[step, sources], self._contents[step, sources])

    def resident_cols(self, step: int, rank: int) -> Cols:
        if not step:
            return self._whole(rank)
        return self.demand.stage((rank - step) % self.world_size, step).cols

    def are_new(self, step: int) -> np.ndarray:
        return np.full(self.world_size, step == 1)

    def num_home(self) -> np.ndarray:
        return (self._ending > 0).sum(0)


class _Seen(NamedTuple):
    """What ranks see of one another, sorted by distance, then source: arrays `(N,)`.

    Attributes:
        sources, viewers: rank that has the columns, and rank that sees them.
        cols: number of columns.
        contents: a number for the columns.
        lie: whether they are one span.
        begins: index in the spans of the first one of each.
    """

    sources: np.ndarray
    viewers: np.ndarray
    cols: np.ndarray
    contents: np.ndarray
    lie: np.ndarray
    begins: np.ndarray


class DirectTransfers(Transfers):
    """All packets go directly from the source to a rank that sees them, see `DirectRoute`."""

    def __init__(self, inputs: PlanInputs) -> None:
        super().__init__(inputs)
        blocks = [np.zeros((4, 0), dtype=np.int64), *self.demand.visibility()]
        sources, viewers, firsts, ends = map(np.concatenate, zip(*blocks, strict=True))
        self._spans = firsts, ends
        # The spans of a pair follow one another.
        pairs = sources * self.world_size + viewers
        begins = np.flatnonzero(np.diff(pairs, prepend=-1))
        counts = np.diff(begins, append=len(pairs))
        cols, contents = (
            np.add.reduceat(x, begins) if len(begins) else x
            for x in (ends - firsts, mixed(firsts, ends))
        )
        distances = (viewers[begins] - sources[begins]) % self.world_size
        order = np.argsort(distances, kind="stable")
        found = sources[begins], viewers[begins], cols, contents, counts == 1, begins
        self._seen = _Seen(*(x[order] for x in found))
        self._counts = counts[order]
        self._distances, first = np.unique(distances[order], return_index=True)
        self._bounds = [*first.tolist(), len(order)]

    @property
    def num_steps(self) -> int:
        return 1 + len(self._distances)

    def _of_step(self, step: int) -> _Seen:
        """Return what ranks see at the distance of a step after the first."""
        where = slice(self._bounds[step - 1], self._bounds[step])
        return _Seen(*(x[where] for x in self._seen))

    def shards(self, step: int) -> RingHop:
        return self._sent([step + 1] if step + 1 < self.num_steps else [])

    def _sent(self, steps: Sequence[int]) -> RingHop:
        """Return the hop that brings what these steps need."""
        seen = [self._of_step(step) for step in steps]
        rounds = [_messages(x.sources, x.viewers, x.cols, are_own=True) for x in seen]
        return RingHop(tuple(self._packs(seen)), tuple(rounds))

    def _packs(self, seen: list[_Seen]) -> Iterator[Packs]:
        """Yield what sources copy; columns for several ranks are copied once."""
        if not seen:
            return
        sources, _, cols, contents, lie, _ = map(np.concatenate, zip(*seen, strict=True))
        _, first = np.unique(mixed(sources, contents), return_index=True)
        first.sort()
        sources, cols, lie = sources[first], cols[first], lie[first]
        for where in _occurrences(sources):
            own = np.ones(len(where), dtype=bool)
            yield Packs(sources[where], cols[where], own, lie[where])

    def sums(self, step: int) -> RingHop:
        if not step:
            return RingHop()
        seen = self._of_step(step)
        return RingHop((), (_messages(seen.viewers, seen.sources, seen.cols, are_home=True),))

    def resident(self, step: int) -> Resident:
        if not step:
            return self._own()
        seen = self._of_step(step)
        cols, contents = np.zeros_like(self._ranks), np.zeros(self.world_size, dtype=np.uint64)
        cols[seen.viewers], contents[seen.viewers] = seen.cols, seen.contents
        sources = (self._ranks - self._distances[step - 1]) % self.world_size
        return Resident(sources, cols, contents)

    def resident_cols(self, step: int, rank: int) -> Cols:
        if not step:
            return self._whole(rank)
        found = np.flatnonzero(self._of_step(step).viewers == rank)
        if not found.size:
            return Cols()
        at = self._bounds[step - 1] + int(found[0])
        begin = int(self._seen.begins[at])
        where = slice(begin, begin + int(self._counts[at]))
        firsts, ends = (x[where].tolist() for x in self._spans)
        return Cols(tuple(zip(firsts, ends, strict=True)))

    def are_new(self, step: int) -> np.ndarray:
        return np.ones(self.world_size, dtype=bool)

    def num_home(self) -> np.ndarray:
        return np.bincount(self._seen.sources, minlength=self.world_size)


class AllGatherTransfers(DirectTransfers):
    """All packets go in the first hop, see `AllGatherRoute`."""

    def shards(self, step: int) -> RingHop:
        return RingHop() if step else self._sent(range(1, self.num_steps))


class PlannedTransfers(Transfers):
    """The hops of any other route, collected from the objects of all ranks.

    Args:
        inputs: what all ranks see of one another.
        route: a name in `ROUTES`.
    """

    def __init__(self, inputs: PlanInputs, route: str) -> None:
        super().__init__(inputs)
        self._routes = [ROUTES[route](rank, self.demand) for rank in range(self.world_size)]
        self._sources = np.array([x.sources for x in self._routes])
        self._shards = [[x.shards(step) for x in self._routes] for step in range(self.num_steps)]
        self._sums = [[x.sums(step) for x in self._routes] for step in range(self.num_steps)]
        self._resident = [
            {x.source: x.cols for hops in self._shards for x in hops[rank].receives}
            | {rank: self._whole(rank)}
            for rank in range(self.world_size)
        ]

    @property
    def num_steps(self) -> int:
        return self._sources.shape[1]

    def shards(self, step: int) -> RingHop:
        return self._hop(self._shards[step])

    def sums(self, step: int) -> RingHop:
        return self._hop(self._sums[step])

    def _hop(self, hops: list[Hop]) -> RingHop:
        packs, messages = dict[tuple[int, int, Cols], None](), []
        for rank, hop in enumerate(hops):
            for source, cols, peer in hop.sends:
                distance = (peer - rank) % self.world_size
                messages.append((distance, rank, peer, len(cols), source == rank, source == peer))
                if source == rank or cols != self._resident[rank][source]:
                    packs[rank, source, cols] = None
        messages.sort()
        table = np.array(messages, dtype=np.int64).reshape(-1, 6).T
        keys = table[0] * self.world_size + table[1]
        rounds = []
        for distance in np.unique(table[0]):
            of_distance = np.flatnonzero(table[0] == distance)
            for where in _occurrences(keys[of_distance]):
                _, *found = table[:, of_distance[where]]
                rounds.append(Messages(*found[:3], *(x.astype(bool) for x in found[3:])))
        return RingHop(tuple(self._packed(list(packs))), tuple(rounds))

    def _packed(self, packs: list[tuple[int, int, Cols]]) -> Iterator[Packs]:
        rows = [(rank, len(x), rank == source, len(x.spans) == 1) for rank, source, x in packs]
        ranks, cols, own, single = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        for where in _occurrences(ranks):
            are_own = own[where] > 0
            yield Packs(ranks[where], cols[where], are_own, are_own & (single[where] > 0))

    def resident(self, step: int) -> Resident:
        cols = [self.resident_cols(step, rank) for rank in range(self.world_size)]
        contents = np.array([content_of(x) if x else 0 for x in cols], dtype=np.uint64)
        return Resident(self._sources[:, step], np.array(list(map(len, cols))), contents)

    def resident_cols(self, step: int, rank: int) -> Cols:
        return self._resident[rank].get(int(self._sources[rank, step]), Cols())

    def are_new(self, step: int) -> np.ndarray:
        arrived = [
            {x.source for hops in self._sums[:step] for x in hops[rank].receives}
            for rank in range(self.world_size)
        ]
        sources = self._sources[:, step].tolist()
        return np.array(
            [source not in known for source, known in zip(sources, arrived, strict=True)]
        )

    def num_home(self) -> np.ndarray:
        received = [
            [x.source for hops in self._sums for x in hops[rank].receives]
            for rank in range(self.world_size)
        ]
        return np.array([sources.count(rank) for rank, sources in enumerate(received)])


def _messages(
    senders: np.ndarray,
    receivers: np.ndarray,
    cols: np.ndarray,
    are_own: bool = False,
    are_home: bool = False,
) -> Messages:
    own, home = (np.full(len(senders), x) for x in (are_own, are_home))
    return Messages(senders, receivers, cols, own, home)


def _packs(ranks: np.ndarray, cols: np.ndarray) -> tuple[Packs, ...]:
    """Return copies of packets of other ranks' shards, or none."""
    no = np.zeros(len(ranks), dtype=bool)
    return (Packs(ranks, cols, no, no),) if len(ranks) else ()


def _occurrences(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yield indices of the first entry of each id, then those of the second, and so on."""
    order = np.argsort(ids, kind="stable")
    is_new = np.diff(ids[order], prepend=-1) != 0
    begins = np.flatnonzero(is_new)
    number = np.arange(len(ids)) - np.repeat(begins, np.diff(begins, append=len(ids)))
    for n in range(int(number.max(initial=-1)) + 1):
        yield np.sort(order[number == n])
