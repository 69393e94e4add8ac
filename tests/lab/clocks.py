"""Replays recordings rank by rank and event by event, with plain numbers, to check `replay.py`.

It shares with it what ranks were recorded to do and what each thing takes, but no code that tells
when: a rank here has a host, a stream, and ports, as a dictionary each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dtensor_ring.lab.machine import Curve, Links, Machine
from dtensor_ring.lab.recorded import ADD, EXCHANGE, MERGE, TILE, WAIT, Recording
from dtensor_ring.lab.replay import KernelSeconds

Message = tuple[int, int, list[float]]
"""Sender, receiver, and the bytes of what goes at once."""


@dataclass
class Rank:
    """When a rank's host, stream and ports are free, and how long it waited for messages."""

    machine: Machine
    host: float = 0.0
    free: float = 0.0
    waited: float = 0.0
    ports: dict[tuple[str, bool], float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        self.host += self.machine.launch
        self.free = max(self.free, self.host) + seconds
        self._follow()

    def wait(self, phase: int) -> None:
        if (done := self.done.get(phase, 0.0)) > self.free:
            self.waited += max(0.0, done - max(self.free, self.host))
            self.free = done
            self._follow()

    def post(self) -> float:
        self.host += self.machine.hop
        return max(self.free, self.host)

    def _follow(self) -> None:
        if self.machine.host_waits:
            self.host = max(self.host, self.free)


class Clocks:
    """All ranks in one direction.

    Args:
        recordings: of all ranks.
        kernels: what tiles take.
        heads: ranks of a group of an all-to-all.
        is_forward: the direction.
    """

    def __init__(
        self, recordings: Sequence[Recording], kernels: KernelSeconds, heads: int, is_forward: bool
    ) -> None:
        self.kernels, self.machine, self.heads = kernels, kernels.machine, heads
        self.is_forward, self.labels = is_forward, recordings[0].labels
        self.does = [x.does.tolist() for x in recordings]
        self.sends = [x.sends.tolist() for x in recordings]
        self.ranks = [Rank(self.machine) for _ in recordings]

    def run(self) -> list[Rank]:
        """Replay all phases, and return the ranks."""
        for phase in range(len(self.labels)):
            for rank, does in zip(self.ranks, self.does, strict=True):
                slow, _ = self.slowed(self.ranks.index(rank), phase)
                for at, what, number, *tile in does:
                    if at != phase:
                        continue
                    if what == WAIT:
                        rank.wait(number)
                    else:
                        rank.run(self.seconds(what, number, *tile) * (slow if what == TILE else 1))
            messages = self.messages(phase)
            taking_part = {x for message in messages for x in message[:2]}
            posted = {x: self.ranks[x].post() for x in sorted(taking_part)}
            if messages and self.labels[phase].ring == EXCHANGE:
                self.exchange(phase, messages, posted)
            elif messages:
                self.move(phase, messages, posted)
        return self.ranks

    def seconds(self, what: int, number: int, form: int, heads: int) -> float:
        if what == TILE:
            return float(self.kernels.of(number, form, heads, self.is_forward))
        return (self.machine.merge if what in (MERGE, ADD) else self.machine.pack)(float(number))

    def messages(self, phase: int) -> list[Message]:
        found: dict[tuple[int, int], list[float]] = {}
        for rank, sends in enumerate(self.sends):
            for at, peer, size in sends:
                if at == phase:
                    found.setdefault((rank, peer), []).append(float(size))
        return [(*ends, sizes) for ends, sizes in found.items()]

    def is_between(self, one: int, other: int) -> bool:
        return one // self.machine.ranks_per_host != other // self.machine.ranks_per_host

    def link(self, message: Message) -> Links:
        between = self.is_between(*message[:2])
        return self.machine.between if between else self.machine.inside

    def busy(self, message: Message) -> tuple[float, float]:
        """Seconds of latency, and those in which it takes both ports."""
        curve: Curve = self.link(message).p2p
        latency = curve(0.0)
        return latency, sum(curve(size) - latency for size in message[2])

    def load(self, rank: int, phase: int) -> float:
        """What the messages of a phase take on a rank alone."""
        if self.labels[phase].ring == EXCHANGE:
            return 0.0
        both = [0.0, 0.0]
        for message in self.messages(phase):
            for side in (0, 1):
                if message[side] == rank:
                    both[side] += sum(self.busy(message))
        return max(both)

    def tiles(self, rank: int, phase: int) -> float:
        return sum(self.seconds(w, *n) for at, w, *n in self.does[rank] if (at, w) == (phase, TILE))

    def slowed(self, rank: int, phase: int) -> tuple[float, float]:
        """How many times longer tiles of a phase take, and the messages that are beside them."""
        if phase not in self.with_tiles():
            return 1.0, 1.0
        before = max((x for x in self.with_tiles() if x < phase), default=0)
        kernels = self.tiles(rank, phase)
        transfers = sum(self.load(rank, x) for x in range(before, phase))
        slow, slower = self.machine.beside_transfer, self.machine.beside_kernel
        if not kernels or not transfers:
            return 1.0, 1.0
        if kernels * slow <= transfers * slower:  # the kernels end first
            rest = transfers - kernels * slow / slower
            return slow, (kernels * slow + rest) / transfers
        rest = kernels - transfers * slower / slow
        return (transfers * slower + rest) / kernels, slower

    def with_tiles(self) -> list[int]:
        return sorted({at for does in self.does for at, what, *_ in does if what == TILE})

    def move(self, phase: int, messages: list[Message], posted: dict[int, float]) -> None:
        """Start messages, which share the ports of their ranks."""
        beside = next((x for x in self.with_tiles() if x > phase), None)
        slower = [1.0] * len(self.ranks)
        if beside is not None:
            slower = [self.slowed(x, beside)[1] for x in range(len(self.ranks))]
        load: dict[tuple[int, str, bool], float] = {}
        ends = []
        for message in messages:
            factor, between = max(slower[x] for x in message[:2]), self.is_between(*message[:2])
            ports = [(x, side, between) for x, side in zip(message[:2], "sr", strict=True)]
            for port in ports:
                load[port] = load.get(port, 0.0) + self.busy(message)[1] * factor
            ready = max(posted[x] for x in message[:2])
            free = max(
                self.ranks[x].ports.get(port, 0.0) for x, *port in ports for port in [tuple(port)]
            )
            ends.append((max(ready, free), ports, self.busy(message)[0] * factor))
        for begin, ports, latency in ends:
            end = begin + max(load[port] for port in ports) + latency
            for port in ports:
                rank, name = self.ranks[port[0]], port[1:]
                rank.ports[name] = max(rank.ports.get(name, 0.0), begin + load[port])
                rank.done[phase] = max(rank.done.get(phase, 0.0), end)

    def exchange(self, phase: int, messages: list[Message], posted: dict[int, float]) -> None:
        """Start an all-to-all: the ranks of a group begin together, and end together."""
        for first in range(0, len(self.ranks), self.heads):
            group = range(first, first + self.heads)
            times = [0.0]
            for rank in group:
                for links, level in ((self.machine.inside, False), (self.machine.between, True)):
                    sizes = [
                        sum(
                            sum(x[2])
                            for x in messages
                            if x[side] == rank and self.is_between(*x[:2]) == level
                        )
                        for side in (0, 1)
                    ]
                    times.append(links.all_to_all(max(sizes)) if any(sizes) else 0.0)
            begin = max((posted[x] for x in group if x in posted), default=0.0)
            for rank in group:
                if rank in posted:
                    self.ranks[rank].done[phase] = begin + max(times)
