"""The time of each rank's host, kernels and messages, as arrays over ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.lab.machine import Machine


class Spans(NamedTuple):
    """What some ranks do once: arrays `(M,)`, times in seconds.

    Attributes:
        ring: "forward", "backward" or "exchange".
        step: number of the step.
        what: as in the labels of `dtensor_ring.compute.trace`, or "message".
        stream: "host", "compute", "send" or "receive".
        ranks: who does it.
        sources: the rank whose keys and values the step of each uses.
        begins, ends: when.
    """

    ring: str
    step: int
    what: str
    stream: str
    ranks: np.ndarray
    sources: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


class Moves(NamedTuple):
    """Messages that start together: arrays `(M,)`.

    Attributes:
        senders, receivers: ranks.
        levels: 0 within a host, 1 between two.
        latency: seconds in which a message is under way and its ports are free.
        busy: seconds in which it takes the ports of both ranks.
    """

    senders: np.ndarray
    receivers: np.ndarray
    levels: np.ndarray
    latency: np.ndarray
    busy: np.ndarray


class Clock:
    """When each rank's host, compute stream and ports are free, in seconds.

    The host of a GPU runs ahead: a kernel begins when the host has launched it and the kernels
    before it are done. Each rank has a port to send and one to receive within its host, and the
    same between hosts. A message begins once both ranks have posted it and the hops before have
    left both ports. All messages of a hop are under way at once, and share the ports.

    Args:
        machine: what each takes.
        num_ranks: number of ranks.
        keeps_spans: whether to keep what each rank does when.
    """

    def __init__(self, machine: Machine, num_ranks: int, keeps_spans: bool) -> None:
        self._machine, self._keeps_spans = machine, keeps_spans
        self._ranks = np.arange(num_ranks)
        self._sources, self._ring, self._step = self._ranks, "", 0
        self.free, self._host = np.zeros(num_ranks), np.zeros(num_ranks)
        self._ports = np.zeros(4 * num_ranks)  # by direction, then level, then rank
        self.waited = np.zeros(num_ranks)
        self.spans: list[Spans] = []

    def at(self, ring: str, step: int, sources: np.ndarray | None = None) -> None:
        """Name what follows; without sources, each rank is its own."""
        self._ring, self._step = ring, step
        self._sources = self._ranks if sources is None else sources

    def run(self, what: str, seconds: np.ndarray, active: np.ndarray) -> None:
        """Run a kernel on active ranks."""
        self._host = self._host + self._machine.launch * active
        begins = np.maximum(self.free, self._host)
        self.free = np.where(active, begins + seconds, self.free)
        self._note(what, "compute", active, begins, self.free)
        self._follow(active)

    def _follow(self, active: np.ndarray) -> None:
        """Let hosts wait for their kernels, if they do."""
        if self._machine.host_waits:
            self._host = np.where(active, np.maximum(self._host, self.free), self._host)

    def post(self, what: str, active: np.ndarray) -> np.ndarray:
        """Post a hop on active ranks; return when its messages may leave."""
        before = self._host
        self._host = self._host + self._machine.hop * active
        self._note(what, "host", active, before, self._host)
        # What is sent was computed or packed before.
        return np.maximum(self.free, self._host)

    def move(self, moves: Moves, posted: np.ndarray, slower: np.ndarray) -> np.ndarray:
        """Send messages at once; return when each rank's last one is done.

        Args:
            moves: the messages.
            posted: when each rank posted them.
            slower: how many times longer its messages take, see `beside`.
        """
        size, (senders, receivers, levels, latency, busy) = len(self._ranks), moves
        factor = np.maximum(slower[senders], slower[receivers])
        # Ports to send, within a host and between two, then ports to receive.
        out, into = levels * size + senders, (2 + levels) * size + receivers
        busy = busy * factor
        load = np.bincount(out, busy, 4 * size) + np.bincount(into, busy, 4 * size)
        free = self._ports[out], self._ports[into]
        begins = np.maximum.reduce([posted[senders], posted[receivers], *free])
        # What shares a port is done when all of it is: nothing says which message is first.
        ends = begins + np.maximum(load[out], load[into]) + latency * factor
        done = np.full(size, -np.inf)
        for stream, ranks, at in zip(("send", "receive"), moves[:2], (out, into), strict=True):
            np.maximum.at(self._ports, at, begins + load[at])
            np.maximum.at(done, ranks, ends)
            self._note("message", stream, ranks, begins, ends)
        return done

    def wait(self, what: str, done: np.ndarray) -> None:
        """Let each rank's kernels wait until its messages are done."""
        late = done > self.free
        # Before its host queues the wait, a stream has nothing to do, with or without messages.
        begins = np.maximum(self.free, self._host)
        self.waited = self.waited + np.where(late, np.maximum(done - begins, 0.0), 0.0)
        self._note(what, "compute", done > begins, begins, done)
        self.free = np.where(late, done, self.free)
        self._follow(late)

    def transfer(self, begins: np.ndarray, ends: np.ndarray, active: np.ndarray) -> None:
        """Note messages that take as long as a whole all-to-all."""
        for stream in ("send", "receive"):
            self._note("message", stream, active, begins, ends)

    def _note(
        self, what: str, stream: str, where: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> None:
        """Keep spans of some ranks: `where` is a mask of all, or the ranks of the times."""
        if not self._keeps_spans:
            return
        if where.dtype == bool:
            begins, ends, where = begins[where], ends[where], np.flatnonzero(where)
        if len(where):
            ring, step, sources = self._ring, self._step, self._sources[where]
            self.spans.append(Spans(ring, step, what, stream, where, sources, begins, ends))


def beside(
    machine: Machine, kernels: np.ndarray, transfers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many times longer kernels and transfers take that begin together on a rank.

    Both are slower until the shorter one ends.

    Args:
        machine: has the factors.
        kernels: seconds of the kernels of a step alone, `(W,)`.
        transfers: seconds of its messages alone, `(W,)`.
    """
    slow, slower = machine.beside_transfer, machine.beside_kernel
    # What is left of the longer one when the shorter one ends has its usual speed.
    together = np.minimum(kernels * slow, transfers * slower)
    kernel = kernels + together * (1 - 1 / slow)
    transfer = transfers + together * (1 - 1 / slower)
    return tuple(  # type: ignore[return-value]
        np.divide(long, alone, out=np.ones_like(alone), where=alone > 0)
        for long, alone in ((kernel, kernels), (transfer, transfers))
    )
