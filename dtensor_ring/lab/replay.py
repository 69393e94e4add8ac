"""Replays on a machine what ranks were recorded to do: when each of them does what.

Only messages need the times of two ranks; all else is of a rank alone. So a phase of all ranks, see
Note [Phases] in `recorded.py`, is a few operations on arrays over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from dtensor_ring.lab.clock import Clock, Moves, Spans, beside
from dtensor_ring.lab.machine import FORMS, Machine
from dtensor_ring.lab.recorded import EXCHANGE, MERGE, PACK, PACKET, TILE, UNPACK, WAIT, Recording
from dtensor_ring.lab.recorded_ranks import RecordedRanks, StandIns
from dtensor_ring.planning.ranges import differing


class Direction(NamedTuple):
    """The forward or the backward of an attention: arrays over ranks, `(W,)`.

    Attributes:
        ends: when each rank is done, in seconds.
        waited: seconds in which its kernels wait for messages.
        sent: bytes that it sends.
        spans: what ranks do when; empty if it was not asked for.
    """

    ends: np.ndarray
    waited: np.ndarray
    sent: np.ndarray
    spans: tuple[Spans, ...]


class KernelSeconds(NamedTuple):
    """What tiles of an attention take on a machine.

    Attributes:
        machine: has the speeds.
        dtype: of query, key and value, such as "bfloat16".
        head_dim: of queries and keys.
        kernel: a name of the machine's; `None` for its first.
    """

    machine: Machine
    dtype: str
    head_dim: int
    kernel: str | None

    def of(self, pairs: np.ndarray, form: int, heads: int, is_forward: bool) -> np.ndarray:
        """Return the seconds of launches of a form with some query heads, see `Recording`."""
        speed = self.machine.speed(self.dtype, self.head_dim, FORMS[form], self.kernel, heads)
        if is_forward:  # FLOPs: see `KernelSpeed`
            return speed.forward(4.0 * self.head_dim * pairs)
        return speed.backward(10.0 * self.head_dim * pairs)

    def of_tiles(self, does: np.ndarray, is_forward: bool) -> np.ndarray:
        """Return the seconds of the launches among the columns of `Recording.does`, else 0."""
        _, what, numbers, forms, heads = does
        seconds, tiles = np.zeros(len(what)), what == TILE
        for form, count in {*zip(forms[tiles].tolist(), heads[tiles].tolist(), strict=True)}:
            where = tiles & (forms == form) & (heads == count)
            seconds[where] = self.of(numbers[where], form, count, is_forward)
        return seconds


def replayed(
    ranks: RecordedRanks, kernels: KernelSeconds, is_forward: bool, keeps_spans: bool = False
) -> Direction:
    """Return the times of one direction.

    Args:
        ranks: what they do.
        kernels: what tiles take.
        is_forward: which direction.
        keeps_spans: whether to keep what each rank does when.
    """
    recorded = ranks.direction(is_forward)
    return _Replay(ranks.stand_ins, recorded, kernels, is_forward, keeps_spans).direction()


def least_tiles(ranks: RecordedRanks, kernels: KernelSeconds) -> float:
    """Return what both directions take at least: the tiles of the last rank."""
    does = ranks.last.direction(is_forward=True).does.T
    both = (kernels.of_tiles(does, x) for x in (True, False))
    return sum(float(seconds.sum()) for seconds in both)


def least_alone(ranks: RecordedRanks, kernels: KernelSeconds, is_forward: bool) -> float:
    """Return what a direction takes at least: the last rank, if all others only wait for it."""
    found = ranks.last.direction(is_forward)
    waiting = found._replace(does=found.does[:0], sends=found.sends[:0])
    is_last = (np.arange(ranks.size) == ranks.last_rank).astype(np.int64)
    alone = StandIns(ranks.heads, is_last * ranks.last_rank, is_last)
    # What arrives is not counted, so how much its messages slow each other is not known.
    unslowed = kernels._replace(machine=_unslowed(kernels.machine))
    replay = _Replay(alone, [waiting, found], unslowed, is_forward, keeps_spans=False)
    return float(replay.direction().ends[ranks.last_rank])


@lru_cache(maxsize=16)
def _unslowed(machine: Machine) -> Machine:
    """Return a machine whose messages no kernel slows."""
    return replace(machine, beside_kernel=1.0)


class _Phase(NamedTuple):
    """What the recorded ranks do in a phase: the first of each, the second, and so on, `(n, K)`.

    Attributes:
        what: `TILE` to `WAIT`, or -1 for nothing.
        seconds: what it takes alone; 0 for a wait.
        started: the phase whose messages a wait is for.
    """

    what: np.ndarray
    seconds: np.ndarray
    started: np.ndarray


class _Work:
    """What recorded ranks do, with the seconds that it takes.

    Args:
        recordings: of the recorded ranks.
        kernels: what tiles take.
        is_forward: the direction.
    """

    def __init__(
        self, recordings: Sequence[Recording], kernels: KernelSeconds, is_forward: bool
    ) -> None:
        self.labels = [x.labels for x in recordings]
        self.num_phases, self._num_kinds = len(self.labels[0]), len(recordings)
        assert all(len(x) == self.num_phases for x in self.labels), "all ranks have the same steps"
        kinds, does = _joined([x.does for x in recordings])
        phases, what, numbers, *_ = does
        machine, of_tiles = kernels.machine, kernels.of_tiles(does, is_forward)
        seconds = of_tiles.copy()
        for curve, where in (
            (machine.pack, (what >= PACKET) & (what <= UNPACK)),
            (machine.merge, (what >= MERGE) & (what < WAIT)),
        ):
            seconds[where] = curve(numbers[where].astype(float))
        # Seconds of the tiles of each phase alone, `(P, K)`.
        shape = self.num_phases, self._num_kinds
        at = phases * shape[1] + kinds
        self.tiles = np.bincount(at, of_tiles, shape[0] * shape[1]).reshape(shape)
        # What a rank does in a phase is in order, side by side.
        places = np.arange(len(what))
        self._places = places - np.maximum.accumulate(np.where(differing(at), places, 0))
        self._order = np.argsort(phases, kind="stable")
        self._bounds = np.searchsorted(phases[self._order], np.arange(shape[0] + 1))
        self._columns = kinds, what, seconds, numbers

    def phase(self, number: int) -> _Phase | None:
        """Return what ranks do in a phase, `None` if none does anything."""
        where = self._order[self._bounds[number] : self._bounds[number + 1]]
        if not len(where):
            return None
        kinds, what, seconds, numbers = (x[where] for x in self._columns)
        places = self._places[where]
        shape = int(places.max()) + 1, self._num_kinds
        found = _Phase(np.full(shape, -1), np.zeros(shape), np.zeros(shape, dtype=np.int64))
        for table, values in zip(found, (what, seconds, numbers), strict=True):
            table[places, kinds] = values
        return found

    def has_kernels(self, number: int) -> bool:
        """Return whether a rank does more in a phase than packing."""
        where = self._order[self._bounds[number] : self._bounds[number + 1]]
        return bool((~np.isin(self._columns[1][where], (PACKET, PACK))).any())


def _joined(tables: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the table of each row, and all rows, column by column."""
    kinds = np.repeat(np.arange(len(tables)), list(map(len, tables)))
    return kinds, np.concatenate(tables).T


class _Sends:
    """The messages of all ranks, phase by phase.

    Args:
        recordings: of the recorded ranks.
        ranks: which of them stands for each rank.
        machine: has the links.
    """

    def __init__(self, recordings: Sequence[Recording], ranks: StandIns, machine: Machine) -> None:
        self._links, self.size = (machine.inside, machine.between), len(ranks.kinds)
        self.is_exchange = np.array([x.ring == EXCHANGE for x in recordings[0].labels])
        of_kinds = [self._merged(x.sends) for x in recordings]
        every = [
            self._of_rank(rank, like, of_kinds[kind], ranks.heads)
            for rank, (like, kind) in enumerate(zip(ranks.ranks, ranks.kinds, strict=True))
        ]
        columns = np.concatenate(every, axis=1)
        columns = columns[:, np.argsort(columns[0], kind="stable")]
        phases, senders, receivers = columns[:3].astype(np.int64)
        hosts = machine.ranks_per_host
        levels = (senders // hosts != receivers // hosts).astype(np.int64)
        latency = np.array([x.p2p.seconds[0] for x in self._links])[levels]
        self._moves = Moves(senders, receivers, levels, latency, np.choose(levels, columns[4:]))
        self.num_bytes = columns[3]
        self._bounds = np.searchsorted(phases, np.arange(len(self.is_exchange) + 1))

    def _merged(self, sends: np.ndarray) -> np.ndarray:
        """Return phase, peer, bytes, and seconds within a host and between two, `(5, M)`.

        What a rank sends to one peer in one phase, such as key and value, goes together.
        """
        phases, peers, num_bytes = sends.T
        # Latency is the time of the smallest message. It does not take the ports (LogGP,
        # Alexandrov et al., 1995, doi 10.1145/215399.215427).
        busy = (x.p2p(num_bytes.astype(float)) - x.p2p.seconds[0] for x in self._links)
        columns = np.array([phases, peers, num_bytes, *busy])
        first = np.flatnonzero(differing(phases * self.size + peers))
        if len(first):
            columns[2:, first] = np.add.reduceat(columns[2:], first, axis=1)
        return columns[:, first]

    def _of_rank(self, rank: int, like: int, merged: np.ndarray, heads: int) -> np.ndarray:
        """Return phase, sender, receiver, bytes and seconds of a rank that does as another one."""
        phases, peers = merged[:2].astype(np.int64)
        ahead = peers + rank - like
        in_group = rank // heads * heads + ahead % heads
        receivers = np.where(self.is_exchange[phases], in_group, ahead % self.size)
        return np.array([phases, np.full(len(phases), rank), receivers, *merged[2:]])

    def __contains__(self, number: int) -> bool:
        return bool(self._bounds[number] < self._bounds[number + 1])

    def _where(self, number: int) -> slice:
        return slice(self._bounds[number], self._bounds[number + 1])

    def moves(self, number: int) -> Moves:
        """Return the messages that start at the end of a phase."""
        where = self._where(number)
        return Moves._make(x[where] for x in self._moves)

    @cached_property
    def sent(self) -> np.ndarray:
        """Bytes that each rank sends, `(W,)`."""
        return np.bincount(self._moves.senders, self.num_bytes, self.size)

    def load(self, number: int) -> np.ndarray:
        """Return the seconds that the messages of a phase take on each rank alone, `(W,)`."""
        moves = self.moves(number)
        seconds = moves.latency + moves.busy
        sent, received = (np.bincount(x, seconds, self.size) for x in moves[:2])
        return np.maximum(sent, received)

    def exchange_seconds(self, number: int) -> np.ndarray:
        """Return the seconds of an all-to-all by each rank's bytes, `(W,)`."""
        moves, found = self.moves(number), np.zeros(self.size)
        num_bytes = self.num_bytes[self._where(number)]
        for level, links in enumerate(self._links):
            of_level = np.where(moves.levels == level, num_bytes, 0.0)
            sent, received = (np.bincount(x, of_level, self.size) for x in moves[:2])
            most = np.maximum(sent, received)
            found = np.maximum(found, np.where(most > 0, links.all_to_all(most), 0.0))
        return found


# What labels call what a rank does; sums that arrived are added by a merge.
_NAMES = "tile", "pack", "pack", "unpack", "merge", "merge"

# No message is under way.
_NEVER = -np.inf


class _Replay:
    """The time of all ranks as it goes on, phase by phase.

    Args:
        ranks: which recorded rank stands for each rank.
        recordings: of the recorded ranks.
        kernels: what tiles take, and the machine.
        is_forward: the direction.
        keeps_spans: whether to keep what each rank does when.
    """

    def __init__(
        self,
        ranks: StandIns,
        recordings: Sequence[Recording],
        kernels: KernelSeconds,
        is_forward: bool,
        keeps_spans: bool,
    ) -> None:
        self._ranks, self._machine, self._keeps_spans = ranks, kernels.machine, keeps_spans
        self._work = _Work(recordings, kernels, is_forward)
        self._sends = _Sends(recordings, ranks, kernels.machine)
        self._clock = Clock(kernels.machine, len(ranks.kinds), keeps_spans)
        # When the messages of each phase are done, by rank, and what labels call them.
        self._done: dict[int, np.ndarray] = {}
        self._waits: dict[int, str] = {}

    def direction(self) -> Direction:
        """Return the times."""
        slow, slower = self._slowed()
        for number in range(self._work.num_phases):
            if self._keeps_spans:
                self._name(number)
            phase = self._work.phase(number)
            if phase is not None:
                self._run(phase, slow.get(number))
            if number in self._sends:
                self._start(number, slower.get(number))
        clock = self._clock
        return Direction(clock.free, clock.waited, self._sends.sent, tuple(clock.spans))

    def _name(self, number: int) -> None:
        labels = [x[number] for x in self._work.labels]
        ranks, size = np.arange(self._sends.size), self._sends.size
        sources = np.array([x.source for x in labels])[self._ranks.kinds]
        sources = (sources + ranks - self._ranks.ranks) % size
        self._clock.at(labels[0].ring, labels[0].step, sources)

    def _run(self, phase: _Phase, slow: np.ndarray | None) -> None:
        """Let ranks do the first of each, then the second, and so on."""
        what, seconds, started = (of_kinds[:, self._ranks.kinds] for of_kinds in phase)
        if slow is not None:
            seconds = np.where(what == TILE, seconds * slow, seconds)
        waits = what == WAIT
        runs, started = (what >= 0) & ~waits, np.where(waits, started, -1)
        for row, (one_runs, one_waits) in enumerate(zip(runs.any(1), waits.any(1), strict=True)):
            for name, active in self._named(what[row], runs[row]) if one_runs else ():
                self._clock.run(name, seconds[row], active)
            if one_waits:
                self._wait(started[row])

    def _named(self, what: np.ndarray, runs: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield what ranks run and who does; without spans, names do not matter."""
        if not self._keeps_spans:
            yield "", runs
            return
        for name in dict.fromkeys(_NAMES[x] for x in np.unique(what[runs]).tolist()):
            yield name, runs & np.isin(what, [i for i, x in enumerate(_NAMES) if x == name])

    def _wait(self, started: np.ndarray) -> None:
        """Wait for the messages of a phase; -1 stands for none."""
        known = {*started.tolist()} - {-1}
        done = np.full(len(started), _NEVER)
        for number in known & self._done.keys():
            done = np.where(started == number, self._done[number], done)
        self._clock.wait(self._waits.get(min(known), "wait"), done)

    def _start(self, number: int, slower: np.ndarray | None) -> None:
        """Start the messages of a phase."""
        moves, sends, size = self._sends.moves(number), self._sends, self._sends.size
        active = np.zeros(size, dtype=bool)
        active[moves.senders] = active[moves.receivers] = True
        after = self._keeps_spans and self._work.has_kernels(number)
        self._waits[number] = "wait for sums" if after else "wait"
        posted = self._clock.post("send sums" if after else "send", active)
        if not sends.is_exchange[number]:
            slower = np.ones(size) if slower is None else slower
            self._done[number] = self._clock.move(moves, posted, slower)
            return
        # All ranks of a group begin when the last one is ready, and end together.
        begins = self._latest(np.where(active, posted, _NEVER))
        ends = begins + self._latest(sends.exchange_seconds(number))
        self._clock.transfer(begins, ends, active)
        self._done[number] = np.where(active, ends, _NEVER)

    def _latest(self, times: np.ndarray) -> np.ndarray:
        """Return the latest time of each rank's group, for each rank."""
        heads = self._ranks.heads
        return np.repeat(times.reshape(-1, heads).max(1), heads)

    def _slowed(self) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Return how many times longer tiles of each phase take, and messages.

        Messages are under way beside the tiles of the next phase that has any.
        """
        alone, size, before = self._work.tiles, self._sends.size, 0
        slow, slower = dict[int, np.ndarray](), dict[int, np.ndarray]()
        for number in np.flatnonzero(alone.any(1)).tolist():
            under_way = [
                x
                for x in range(before, number)
                if x in self._sends and not self._sends.is_exchange[x]
            ]
            if under_way:
                load = sum(map(self._sends.load, under_way), np.zeros(size))
                kernels = alone[number][self._ranks.kinds]
                slow[number], factor = beside(self._machine, kernels, load)
                slower |= dict.fromkeys(under_way, factor)
            before = number
        return slow, slower
