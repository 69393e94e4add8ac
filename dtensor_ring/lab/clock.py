"""The time of each rank's host, kernels, messages and all-to-alls, as arrays over ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.all_to_all.plan import head_shard_of
from dtensor_ring.lab.machine import Curve, Machine
from dtensor_ring.lab.problem import SimulatedProblem
from dtensor_ring.transport.transport import QUANTISED


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
    """Messages that start together, of which each rank sends and receives at most one: `(M,)`.

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
        self._ports = np.zeros((2, 2, num_ranks))  # send or receive, level, rank
        self.waited = np.zeros(num_ranks)
        self.spans: list[Spans] = []

    def at(self, ring: str, step: int, sources: np.ndarray | None = None) -> None:
        """Name what follows; without sources, each rank is its own."""
        self._ring, self._step = ring, step
        self._sources = self._ranks if sources is None else sources

    def run(self, what: str, seconds: np.ndarray, active: np.ndarray) -> None:
        """Run a kernel on active ranks."""
        if not active.any():
            return
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

    def move(self, rounds: list[Moves], posted: np.ndarray, slower: np.ndarray) -> np.ndarray:
        """Send the messages of a hop at once; return when each rank's last one is done.

        Args:
            rounds: the messages.
            posted: when each rank posted the hop.
            slower: how many times longer its messages take, see `beside`.
        """
        done = np.full(len(self._ranks), -np.inf)
        factors = [np.maximum(slower[x.senders], slower[x.receivers]) for x in rounds]
        load, before = np.zeros_like(self._ports), self._ports.copy()
        for x, factor in zip(rounds, factors, strict=True):
            for side, ranks in enumerate((x.senders, x.receivers)):
                load[side, x.levels, ranks] += x.busy * factor
        for x, factor in zip(rounds, factors, strict=True):
            ends_of = (0, x.levels, x.senders), (1, x.levels, x.receivers)
            begins = np.maximum(posted[x.senders], posted[x.receivers])
            begins = np.maximum(begins, np.maximum(*(before[at] for at in ends_of)))
            # What shares a port is done when all of it is: nothing says which message is first.
            busy = np.maximum(*(load[at] for at in ends_of))
            ends = begins + busy + x.latency * factor
            for stream, at in zip(("send", "receive"), ends_of, strict=True):
                self._ports[at] = np.maximum(self._ports[at], begins + load[at])
                done[at[2]] = np.maximum(done[at[2]], ends)
                self._note("message", stream, at[2], begins, ends)
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
        label = self._ring, self._step, what, stream
        if len(where):
            self.spans.append(Spans(*label, where, self._sources[where], begins, ends))


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


def message_times(curve: Curve, num_bytes: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return latency and busy seconds `(2, M)` of messages that are sent as `count` equal ones.

    Latency is the time of the smallest message. It does not take the ports (LogGP, Alexandrov et
    al., 1995, doi 10.1145/215399.215427).
    """
    latency = curve.seconds[0]
    return np.stack([np.full(len(count), latency), count * (curve(num_bytes / count) - latency)])


class ExchangedBytes(NamedTuple):
    """Bytes of one all-to-all by rank, `(W,)`.

    Attributes:
        sent, received: within the host and between hosts, `(2, W)`.
        kept: what stays on the rank.
    """

    sent: np.ndarray
    received: np.ndarray
    kept: np.ndarray


class Exchange:
    """The all-to-alls around the ring of an attention, see `dtensor_ring.all_to_all`.

    All ranks of a group begin when the last one is ready, and end together: each waits for all.

    Args:
        problem: the attention.
        heads: number of consecutive ranks in a group.
        machine: what each part takes.
    """

    def __init__(self, problem: SimulatedProblem, heads: int, machine: Machine) -> None:
        self._machine, self._heads = machine, heads
        sizes, size = problem.sizes, problem.world_size
        self._tokens = np.array(
            [problem.layout.num_tokens(rank, size, problem.seq_len) for rank in range(size)]
        ).reshape(-1, heads)
        shards = [head_shard_of(member, heads, sizes.heads[1]) for member in range(heads)]
        # Query and key heads of each member.
        self.member_heads = np.array([sizes.heads_of(shard) for shard in shards]).T
        (query, key), (head_dim, value_dim) = self.member_heads, sizes.head_dims
        # Bytes of a token, for the heads of each member, without scales.
        queries, self._output = (sizes.batch * sizes.itemsize * query * x for x in sizes.head_dims)
        keys = sizes.batch * key * (head_dim + value_dim)
        rounded = sizes.kv_itemsize if sizes.kv_dtype in QUANTISED else sizes.itemsize
        self._inputs, self._grads = (queries + keys * x for x in (rounded, sizes.itemsize))
        hosts = np.arange(size).reshape(-1, heads) // machine.ranks_per_host
        is_apart = hosts[:, :, None] != hosts[:, None, :]
        is_other = ~np.eye(heads, dtype=bool)
        self._levels = is_other & ~is_apart, is_other & is_apart

    def run(self, clock: Clock, of_inputs: bool, is_back: bool) -> np.ndarray:
        """Run an all-to-all; return the bytes that each rank sends, `(W,)`.

        Args:
            clock: the time of all ranks, which goes on.
            of_inputs: whether query, key and value are exchanged, or their gradients; else the
                output, or its gradient.
            is_back: whether heads are given for tokens.
        """
        inputs = self._grads if is_back else self._inputs
        found = self.amounts(inputs if of_inputs else self._output, is_back)
        sent, received = found.sent.sum(0), found.received.sum(0)
        moves = (sent > 0) | (received > 0)
        clock.at("exchange", 0)
        clock.run("pack", self._machine.pack(2.0 * sent), sent > 0)
        posted = clock.post("send", moves)
        begins, ends = self._times(found, posted, moves)
        clock.transfer(begins, ends, moves)
        clock.run("unpack", self._machine.pack(2.0 * found.kept), found.kept > 0)
        clock.wait("wait", np.where(moves, ends, -np.inf))
        clock.run("unpack", self._machine.pack(2.0 * received), received > 0)
        return sent

    def amounts(self, token: np.ndarray, is_back: bool) -> ExchangedBytes:
        """Return the bytes of each rank.

        Args:
            token: bytes of a token for the heads of each member, `(heads,)`.
            is_back: whether heads are given for tokens.
        """
        # By group: bytes of the tokens of one member for the heads of another.
        num_bytes = self._tokens[:, :, None] * token
        by_level = [np.where(level, num_bytes, 0) for level in self._levels]
        sent, received = (
            np.stack([x.sum(axis).ravel() for x in by_level])
            for axis in ((1, 2) if is_back else (2, 1))
        )
        kept = np.diagonal(num_bytes, axis1=1, axis2=2).ravel()
        return ExchangedBytes(sent, received, kept)

    def _times(
        self, found: ExchangedBytes, posted: np.ndarray, moves: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return when the messages of each rank's group begin and end."""
        most = np.maximum(found.sent, found.received)
        links = self._machine.inside, self._machine.between
        seconds = np.max(
            [
                np.where(size > 0, link.all_to_all(size.astype(float)), 0.0)
                for link, size in zip(links, most, strict=True)
            ],
            axis=0,
        )
        begins = self._of_group(np.where(moves, posted, -np.inf))
        return begins, begins + self._of_group(seconds)

    def _of_group(self, times: np.ndarray) -> np.ndarray:
        """Return the latest time of each rank's group, for each rank."""
        return np.repeat(times.reshape(-1, self._heads).max(1), self._heads)
