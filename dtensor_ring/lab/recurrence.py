"""The time of an attention, from what all ranks do in each step: no event queue.

A step of all ranks is a few operations on arrays. What a rank does begins at the latest of a few
times, all of which are known: `max(ready, free) + seconds`. `tests/lab/oracle.py` has the same
as processes that wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dtensor_ring.compute.kernels.registry import KERNELS
from dtensor_ring.lab.clock import Clock, Exchange, Moves, Spans, beside, message_times
from dtensor_ring.lab.launch_table import KeptPartials, Pass, launch_table
from dtensor_ring.lab.machine import FORMS, KernelSpeed, Machine
from dtensor_ring.lab.problem import SimulatedProblem
from dtensor_ring.lab.transfers import Messages, Packs, RingHop, transfers_of
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.transport.rotation import LARGE

# Indices of the directions.
FORWARD, BACKWARD = 0, 1


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


class _HopTimes(NamedTuple):
    """What a hop takes: arrays over ranks, `(W,)`.

    Attributes:
        packs: seconds of the copies before it, each with the ranks that make it.
        rounds: its messages.
        moves: whether a rank sends or receives.
        load: seconds that its messages take on a rank alone.
        sent: bytes that a rank sends.
        home: columns of the sums for a rank's own shard that it receives, message by message.
    """

    packs: list[tuple[np.ndarray, np.ndarray]]
    rounds: list[Moves]
    moves: np.ndarray
    load: np.ndarray
    sent: np.ndarray
    home: list[np.ndarray]


class RingTimes:
    """The times of one attention by one strategy.

    Args:
        problem: the attention.
        strategy: how it is made parallel.
        machine: what each part takes.
        keeps_spans: whether to keep what each rank does when.

    Raises:
        ValueError: if the machine lacks the kernel or the dtype.
    """

    def __init__(
        self,
        problem: SimulatedProblem,
        strategy: Strategy,
        machine: Machine,
        keeps_spans: bool = False,
    ) -> None:
        self._problem, self._sizes, self._machine = problem, problem.sizes, machine
        self._keeps_spans, self._members = keeps_spans, strategy.heads
        self._size = problem.world_size
        inputs = problem.inputs(strategy)
        self._transfers = transfers_of(inputs, strategy.route)
        # All tiles of an attention have one kernel.
        self._kernel = problem.kernel or machine.kernel_for(problem.dtype, problem.is_banded)
        kernel = self._speed(FORMS[-1]).kernel
        self._table = launch_table(
            inputs, self._transfers, problem.sizes.batch, has_segments(kernel)
        )
        self._exchange = Exchange(problem, strategy.heads, machine)
        # Query and key heads of each rank.
        self._heads = np.tile(self._exchange.member_heads, self._size // strategy.heads)
        self._variants, variant = np.unique(self._heads[0], return_inverse=True)
        self._variant = variant.ravel()
        # The last hop that was timed, by the bytes of a number.
        self._last: dict[int, tuple[tuple[Messages, ...], _HopTimes]] = {}
        groups = range(self._size // strategy.heads)
        self._num_local = tuple(
            self._each(np.array([side.num_local(group) for group in groups]))
            for side in (inputs.queries, inputs.keys)
        )

    def _each(self, of_groups: np.ndarray) -> np.ndarray:
        """Return a value of each group for each of its ranks."""
        return of_groups if self._members == 1 else np.repeat(of_groups, self._members)

    def _ranks(self, groups: np.ndarray) -> np.ndarray:
        """Return the ranks of each group, in the order of the groups."""
        if self._members == 1:
            return groups
        return (groups[:, None] * self._members + np.arange(self._members)).ravel()

    def forward(self) -> Direction:
        """Return the times of a forward."""
        clock, sent = self._begin(of_inputs=True)
        kept = self._kept(self._num_local[0], self._problem.num_parts)
        for step in range(self._transfers.num_steps):
            hop = self._shards(step)
            slow, slower = beside(self._machine, self._kernel_seconds(step, FORWARD), hop.load)
            clock.at("forward", step, self._sources(step))
            done = self._start(clock, hop, "send", slower)
            self._widen(clock, step)
            for launch in self._launches(step, FORWARD):
                self._merge(clock, self._query_bytes(kept.make_room(launch.active)))
                clock.run("tile", launch.seconds * slow, launch.active)
                kept.add(launch.rows, launch.active)
            clock.wait("wait", done)
            sent = sent + hop.sent
        self._merge(clock, self._query_bytes(kept.result()))
        return self._end(clock, sent, of_inputs=False)

    def backward(self) -> Direction:
        """Return the times of a backward."""
        clock, sent = self._begin(of_inputs=False)
        grad_query = self._kept(self._num_local[0], self._problem.num_parts)
        grad_shard = self._kept(self._num_local[1])
        home = _Home(self._each(self._transfers.num_home()), np.full(self._size, -np.inf), [])
        hop = self._shards(0)
        slow, slower = beside(self._machine, self._kernel_seconds(0, BACKWARD), hop.load)
        for step in range(self._transfers.num_steps):
            clock.at("backward", step, self._sources(step))
            done = self._start(clock, hop, "send", slower)
            self._widen(clock, step)
            # Step 0 is this rank's own shard, whose gradients need not travel.
            shares = self._kept(self._resident_rows(step), 1) if step else grad_shard
            for launch in self._launches(step, BACKWARD):
                of_query, of_keys = (x.make_room(launch.active) for x in (grad_query, shares))
                self._merge(clock, self._query_bytes(of_query) + self._key_bytes(of_keys))
                clock.run("tile", launch.seconds * slow, launch.active)
                grad_query.add(launch.rows, launch.active)
                shares.add(launch.cols, launch.active)
            sent, following = sent + hop.sent, self._shards(step + 1)
            sums = self._sums(step)
            # The sums travel beside the shards and the kernels of the next step.
            seconds = self._kernel_seconds(step + 1, BACKWARD)
            slow, slower = beside(self._machine, seconds, following.load + sums.load)
            if step:
                self._collect(clock, home, grad_shard)
                self._contribute(clock, step, shares)
                home.arriving, home.done = sums.home, self._start(clock, sums, "send sums", slower)
                sent = sent + sums.sent
            clock.wait("wait", done)
            hop = following
        self._collect(clock, home, grad_shard)
        self._merge(clock, self._query_bytes(grad_query.result()))
        self._merge(clock, self._key_bytes(grad_shard.result()))
        return self._end(clock, sent, of_inputs=True)

    def _begin(self, of_inputs: bool) -> tuple[Clock, np.ndarray]:
        """Return a clock after the first all-to-all, and the bytes that it sends."""
        clock = Clock(self._machine, self._size, self._keeps_spans)
        if self._members == 1:
            return clock, np.zeros(self._size)
        return clock, self._exchange.run(clock, of_inputs, is_back=False)

    def _end(self, clock: Clock, sent: np.ndarray, of_inputs: bool) -> Direction:
        """Run the last all-to-all, and return the times."""
        if self._members > 1:
            sent = sent + self._exchange.run(clock, of_inputs, is_back=True)
        return Direction(clock.free, clock.waited, sent, tuple(clock.spans))

    def _kept(self, num_rows: np.ndarray, num_kept: int | None = None) -> KeptPartials:
        """Return the partials of a tensor with so many tokens by rank."""
        sizes = self._sizes
        is_wide = sizes.itemsize == sizes.wide_itemsize
        on_gpu = not self._machine.host_waits
        return KeptPartials(num_rows * sizes.batch, is_wide, on_gpu, num_kept)

    def _query_bytes(self, rows: Pass) -> np.ndarray:
        """Return the bytes of rows like queries, by rank."""
        return self._pass_bytes(rows) * self._heads[0] * self._sizes.head_dims[1]

    def _key_bytes(self, rows: Pass) -> np.ndarray:
        """Return the bytes of rows like keys and values, by rank."""
        return self._pass_bytes(rows) * self._key_numbers

    def _pass_bytes(self, rows: Pass) -> np.ndarray:
        return rows.narrow * self._sizes.itemsize + rows.wide * self._sizes.wide_itemsize

    @cached_property
    def _key_numbers(self) -> np.ndarray:
        """Numbers of a key and a value token of each rank, all heads."""
        return self._heads[1] * sum(self._sizes.head_dims)

    def _merge(self, clock: Clock, num_bytes: np.ndarray) -> None:
        clock.run("merge", self._machine.merge(num_bytes.astype(float)), num_bytes > 0)

    def _sources(self, step: int) -> np.ndarray | None:
        """Return the source of each rank's step, as a rank of the axis, for spans."""
        if not self._keeps_spans:
            return None
        sources = self._each(self._transfers.resident(step).sources)
        return sources * self._members + np.arange(self._size) % self._members

    def _resident_rows(self, step: int) -> np.ndarray:
        return self._each(self._transfers.resident(step).cols)

    def _kernel_seconds(self, step: int, direction: int) -> np.ndarray:
        """Return the seconds of all kernels of a step alone, by rank; 0 after the last step."""
        if step == self._transfers.num_steps:
            return np.zeros(self._size)
        kinds = self._each(self._table.kinds[step])
        return self._seconds[direction].sum(2)[self._variant, kinds]

    @cached_property
    def _seconds(self) -> np.ndarray:
        """Seconds of each launch: `(2, variants, kinds, launches)`, for each number of heads."""
        table, dim = self._table, self._sizes.head_dims[0]
        pairs = table.pairs * self._variants[:, None, None]
        found = np.zeros((2, *pairs.shape))
        for number, form in enumerate(FORMS):
            where = (table.forms == number) & (table.pairs > 0)
            for variant, heads in enumerate(self._variants.tolist()):
                speed, of = self._speed(form, heads), pairs[variant, where]
                # FLOPs: see `KernelSpeed`.
                found[FORWARD, variant, where] = speed.forward(4.0 * dim * of)
                found[BACKWARD, variant, where] = speed.backward(10.0 * dim * of)
        return found

    def _speed(self, form: str, heads: int | None = None) -> KernelSpeed:
        """Return the speed of the kernel for tiles of a form, with so many query heads."""
        problem, dim = self._problem, self._sizes.head_dims[0]
        return self._machine.speed(problem.dtype, dim, form, self._kernel, heads)

    def _launches(self, step: int, direction: int) -> Iterator[_Launch]:
        """Yield the first launch of all ranks, then the second, and so on."""
        table, kinds = self._table, self._each(self._table.kinds[step])
        counts = table.counts[kinds]
        for number in range(counts.max()):
            seconds = self._seconds[direction, self._variant, kinds, number]
            rows, cols = table.rows[kinds, number], table.cols[kinds, number]
            yield _Launch(counts > number, seconds, rows, cols)

    def _start(self, clock: Clock, hop: _HopTimes, what: str, slower: np.ndarray) -> np.ndarray:
        """Pack and post a hop; return when each rank's messages are done."""
        for seconds, active in hop.packs:
            clock.run("pack", seconds, active)
        return clock.move(hop.rounds, clock.post(what, hop.moves), slower)

    def _widen(self, clock: Clock, step: int) -> None:
        """Cast keys and values that came in another dtype."""
        sizes = self._sizes
        if step and sizes.kv_itemsize != sizes.itemsize:
            numbers = self._resident_rows(step) * sizes.batch * self._key_numbers
            num_bytes = numbers * (sizes.kv_itemsize + sizes.itemsize)
            clock.run("pack", self._machine.pack(num_bytes.astype(float)), num_bytes > 0)

    def _collect(self, clock: Clock, home: _Home, grad_shard: KeptPartials) -> None:
        """Add the sums that came home."""
        clock.wait("wait for sums", home.done)
        for cols in home.arriving:
            active = cols > 0
            home.left = home.left - active
            rows = cols * self._sizes.batch
            merged = grad_shard.arrive(rows, active, home.left == 0)
            arrived = rows * self._sizes.sum_itemsize * self._key_numbers
            self._merge(clock, self._key_bytes(merged) + arrived)

    def _contribute(self, clock: Clock, step: int, shares: KeptPartials) -> None:
        """Add the gradients of a step to the sums that travel."""
        rows = self._resident_rows(step) * self._sizes.batch
        # A new sum is written, another one is read, too.
        passes = np.where(self._each(self._transfers.are_new(step)), 1, 2)
        total = rows * passes * self._sizes.sum_itemsize * self._key_numbers
        self._merge(clock, np.where(rows > 0, self._key_bytes(shares.parts()) + total, 0))

    def _shards(self, step: int) -> _HopTimes:
        """Return what the hop of keys and values of a step takes; nothing after the last step."""
        is_over = step == self._transfers.num_steps
        hop = RingHop() if is_over else self._transfers.shards(step)
        return self._hop(hop, self._sizes.kv_itemsize)

    def _sums(self, step: int) -> _HopTimes:
        return self._hop(self._transfers.sums(step), self._sizes.sum_itemsize)

    def _hop(self, hop: RingHop, itemsize: int) -> _HopTimes:
        column = self._sizes.batch * self._key_numbers * itemsize
        known, found = self._last.get(itemsize, (None, None))
        # Most hops of a ring have the messages of the hop before, whose times serve again.
        if found is None or known is None or not _are_equal(known, hop.rounds):
            found = self._hop_times(hop.rounds, column)
            self._last[itemsize] = hop.rounds, found
        return found._replace(packs=[self._packed(x, column) for x in hop.packs])

    def _hop_times(self, of: tuple[Messages, ...], column: np.ndarray) -> _HopTimes:
        """Return what the messages of a hop take."""
        load, sent = np.zeros((2, self._size)), np.zeros(self._size)
        moves = np.zeros(self._size, dtype=bool)
        rounds, home = [], []
        for messages in of:
            found, num_bytes = self._moves(messages, column)
            rounds.append(found)
            for side, ranks in enumerate((found.senders, found.receivers)):
                moves[ranks] = True
                load[side, ranks] += found.latency + found.busy
            sent[found.senders] += num_bytes
            home.append(self._home(messages))
        return _HopTimes([], rounds, moves, load.max(0), sent, home)

    def _moves(self, messages: Messages, column: np.ndarray) -> tuple[Moves, np.ndarray]:
        """Return messages of the ranks of all groups, and their bytes."""
        senders, receivers = map(self._ranks, messages[:2])
        num_bytes = self._each(messages.cols) * column[senders]
        # The owner sends a large key and value as two messages.
        count = 1 + (self._each(messages.are_own) & (num_bytes >= LARGE))
        hosts = self._machine.ranks_per_host
        levels = (senders // hosts != receivers // hosts).astype(np.int64)
        times = np.zeros((2, len(senders)))
        for level, links in enumerate((self._machine.inside, self._machine.between)):
            where = levels == level
            if where.any():
                found = message_times(links.p2p, num_bytes[where].astype(float), count[where])
                times[:, where] = found
        return Moves(senders, receivers, levels, *times), num_bytes

    def _home(self, messages: Messages) -> np.ndarray:
        """Return the columns of sums for its own shard that each rank receives."""
        cols = np.zeros(self._transfers.world_size, dtype=np.int64)
        cols[messages.receivers] = messages.cols * messages.are_home
        return self._each(cols)

    def _packed(self, packs: Packs, column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds and ranks of copies before a hop."""
        ranks, sizes = self._ranks(packs.ranks), self._sizes
        own, lie, cols = (self._each(x) for x in (packs.are_own, packs.lie, packs.cols))
        written = cols * column[ranks]
        # Parts of a batch of several rows are not contiguous.
        is_dense = (sizes.batch == 1) | (cols == self._num_local[1][ranks])
        stays = lie & is_dense & (written >= LARGE) & (sizes.kv_itemsize == sizes.itemsize)
        # The own shard is read in its own dtype.
        read = np.where(own, written * sizes.itemsize // sizes.kv_itemsize, written)
        seconds, active = np.zeros(self._size), np.zeros(self._size, dtype=bool)
        seconds[ranks], active[ranks] = self._machine.pack((read + written).astype(float)), ~stays
        return seconds, active


class _Launch(NamedTuple):
    """A launch of some ranks: arrays over ranks, `(W,)`."""

    active: np.ndarray
    seconds: np.ndarray
    rows: np.ndarray
    cols: np.ndarray


@dataclass
class _Home:
    """Sums of gradients that come back to their rank.

    Attributes:
        left: how many sums each rank will still receive, `(W,)`.
        done: when the messages of the last hop are done, `(W,)`.
        arriving: columns of its sums, message by message.
    """

    left: np.ndarray
    done: np.ndarray
    arriving: list[np.ndarray]


def _are_equal(one: tuple[Messages, ...], other: tuple[Messages, ...]) -> bool:
    """Return whether two hops have the same messages."""
    return len(one) == len(other) and all(
        np.array_equal(x, y)
        for pair in zip(one, other, strict=True)
        for x, y in zip(*pair, strict=True)
    )


def has_segments(kernel: str) -> bool:
    """Return whether a kernel takes segments; "any" and kernels that are not known here do."""
    return kernel not in KERNELS or KERNELS[kernel].has_segments
