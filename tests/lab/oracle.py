"""An attention as SimPy processes: each rank runs its own plan, and waits for the others.

It shares data with the simulator (plans, launches, curves), but no code that tells time: here is a
host for each rank that queues work, a stream that does it, and ports that messages queue for.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.compute.execute import launches
from dtensor_ring.lab.machine import Links, Machine
from dtensor_ring.lab.problem import SimulatedProblem
from dtensor_ring.planning.plan import Plan, Step, plan
from dtensor_ring.planning.route import Hop
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import FULL, Tile
from dtensor_ring.transport.rotation import LARGE
from dtensor_ring.transport.transport import QUANTISED

Process = Generator[Any, Any, None]


@dataclass
class Kept:
    """Rows of partial results; `total` is whether a wide tensor of all rows is among them."""

    size: int
    is_wide: bool
    on_gpu: bool
    room: int | None
    rows: list[int] = field(default_factory=list)
    total: bool = False

    def full(self) -> bool:
        count = len(self.rows) + self.total
        room = self.room or (4 if self.on_gpu and not self.is_wide else 1)
        return count >= 2 and (sum(self.rows) >= room * self.size or (self.on_gpu and count >= 8))

    def merge(self) -> tuple[int, int]:
        """Rows read or written, in the dtype of the result and in the wide one."""
        narrow = sum(self.rows)
        wide = 2 * min(narrow, self.size) if self.total else self.size
        self.rows, self.total = [], True
        return narrow, wide

    def make_room(self) -> tuple[int, int]:
        return self.merge() if self.full() else (0, 0)

    def add(self, rows: int) -> None:
        if self.is_wide and rows == self.size and not self.rows and not self.total:
            self.total = True
        else:
            self.rows.append(rows)

    def arrive(self, rows: int, is_last: bool) -> tuple[int, int]:
        if is_last and not self.total and self.rows == [self.size]:
            return 2 * rows, 0
        narrow, wide = self.merge() if self.rows or not self.total else (0, 0)
        return narrow, wide + 2 * rows

    def parts(self) -> tuple[int, int]:
        return sum(self.rows), self.size * self.total

    def result(self) -> tuple[int, int]:
        if not self.rows and not self.total:
            return 0, 0
        if (
            self.is_wide
            if self.total and not self.rows
            else self.rows == [self.size] and not self.total
        ):
            return 0, 0
        return sum(self.rows) + self.size, self.size * self.total


class Stream:
    """Does what a host queued, in order."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env, self.queue, self.waited = env, simpy.Store(env), 0.0
        env.process(self._run())

    def _run(self) -> Process:
        while True:
            seconds, event, done = yield self.queue.get()
            if event is not None:
                begin = self.env.now
                yield event
                self.waited += self.env.now - begin
            else:
                yield self.env.timeout(seconds)
            done.succeed()

    def put(self, seconds: float = 0.0, event: simpy.Event | None = None) -> simpy.Event:
        done = self.env.event()
        self.queue.put((seconds, event, done))
        return done


class Oracle:
    """All ranks of one attention."""

    def __init__(
        self, problem: SimulatedProblem, strategy: Strategy, machine: Machine, segments: bool
    ):
        self.problem, self.strategy, self.machine = problem, strategy, machine
        self.sizes, self.segments = problem.sizes, segments
        size, mask = problem.world_size, FULL if problem.mask is None else problem.mask
        self.plans = [
            plan(
                *(problem.layout, mask, rank, size, problem.seq_len, problem.documents),
                strategy=strategy,
                slices=problem.slices,
            )
            for rank in range(size)
        ]
        self.exchanges = [
            all_to_all_plan(
                problem.layout, problem.layout, strategy.heads, rank, size, problem.seq_len
            )
            for rank in range(size)
        ]

    def run(self, is_backward: bool) -> list[tuple[float, float]]:
        """When each rank is done, and how long its kernels waited for messages."""
        self.env = simpy.Environment()
        self.is_backward = is_backward
        size = self.problem.world_size
        self.ports = {
            (side, level, rank): simpy.Resource(self.env)
            for side in "sr"
            for level in (0, 1)
            for rank in range(size)
        }
        self.messages: dict[Any, tuple[list[simpy.Event], simpy.Event]] = {}
        self.barriers: dict[Any, tuple[simpy.Event, list[simpy.Event]]] = {}
        self.ranks = [RankProcess(self, rank) for rank in range(size)]
        hosts = [self.env.process(rank.run()) for rank in self.ranks]
        self.env.run(simpy.AllOf(self.env, hosts))
        return [(rank.end, rank.stream.waited) for rank in self.ranks]

    def links(self, one: int, other: int) -> tuple[int, Links]:
        hosts = {rank // self.machine.ranks_per_host for rank in (one, other)}
        return (0, self.machine.inside) if len(hosts) == 1 else (1, self.machine.between)


class RankProcess:
    """One rank: the loops of ring.py."""

    def __init__(self, oracle: Oracle, rank: int) -> None:
        self.o, self.rank, self.env = oracle, rank, oracle.env
        self.plan: Plan = oracle.plans[rank]
        self.machine, self.sizes = oracle.machine, oracle.sizes
        self.heads = self.sizes.heads
        if oracle.strategy.heads > 1:
            self.heads = self.sizes.heads_after(oracle.exchanges[rank])
        self.stream = Stream(self.env)
        self.numbers = self.heads[1] * sum(self.sizes.head_dims)
        self.end = 0.0
        self.known_factors: dict[int, tuple[float, float]] = {}

    # What a host does

    def kernel(self, seconds: float) -> Process:
        yield self.env.timeout(self.machine.launch)
        done = self.stream.put(seconds)
        if self.machine.host_waits:
            yield done

    def wait(self, event: simpy.Event) -> Process:
        done = self.stream.put(event=event)
        if self.machine.host_waits:
            yield done

    def merge(self, num_bytes: int) -> Process:
        if num_bytes:
            yield from self.kernel(self.machine.merge(float(num_bytes)))

    def run(self) -> Process:
        out, inputs = self.tensors()
        before, after = (out, inputs) if self.o.is_backward else (inputs, out)
        yield from self.exchange(before, is_back=False)
        yield from self.backward() if self.o.is_backward else self.forward()
        yield from self.exchange(after, is_back=True)
        done = self.stream.put()
        yield done
        self.end = self.env.now

    def forward(self) -> Process:
        kept = self.kept(self.plan.num_local[0], self.o.problem.num_parts)
        for step, hop in zip(self.plan.steps, self.plan.shards, strict=True):
            done = yield from self.start("shards", step.number, hop)
            yield from self.widen(step)
            for rows, _, seconds in self.launches(step):
                yield from self.merge(self.of_query(kept.make_room()))
                yield from self.kernel(seconds * self.factors(step.number)[0])
                kept.add(rows)
            yield from self.wait(done)
        yield from self.merge(self.of_query(kept.result()))

    def backward(self) -> Process:
        grad_query = self.kept(self.plan.num_local[0], self.o.problem.num_parts)
        grad_shard = self.kept(self.plan.num_local[1], None)
        own = [x for hop in self.plan.sums for x in hop.receives if x.source == self.rank]
        self.left, known = len(own), set[int]()
        pending, last = Hop(), self.env.event().succeed()
        for step, hop in zip(self.plan.steps, self.plan.shards, strict=True):
            done = yield from self.start("shards", step.number, hop)
            yield from self.widen(step)
            shares = self.kept(len(step.cols), 1) if step.number else grad_shard
            for rows, cols, seconds in self.launches(step):
                room = self.of_query(grad_query.make_room()) + self.of_keys(shares.make_room())
                yield from self.merge(room)
                yield from self.kernel(seconds * self.factors(step.number)[0])
                grad_query.add(rows)
                shares.add(cols)
            if step.number:
                yield from self.collect(pending, last, grad_shard)
                known |= {x.source for x in pending.receives if x.source != self.rank}
                if step.cols:
                    passes = 2 if step.source in known else 1
                    total = passes * len(step.cols) * self.sizes.batch * self.sizes.sum_itemsize
                    yield from self.merge(self.of_keys(shares.parts()) + total * self.numbers)
                pending = self.plan.sums[step.number]
                last = yield from self.start("sums", step.number, pending)
            yield from self.wait(done)
        yield from self.collect(pending, last, grad_shard)
        yield from self.merge(self.of_query(grad_query.result()))
        yield from self.merge(self.of_keys(grad_shard.result()))

    def collect(self, hop: Hop, done: simpy.Event, grad_shard: Kept) -> Process:
        yield from self.wait(done)
        own = [x for x in hop.receives if x.source == self.rank]
        for x in sorted(own, key=lambda x: (self.rank - x.peer) % len(self.o.plans)):
            self.left -= 1
            rows = len(x.cols) * self.sizes.batch
            merged = self.of_keys(grad_shard.arrive(rows, not self.left))
            yield from self.merge(merged + rows * self.sizes.sum_itemsize * self.numbers)

    def widen(self, step: Step) -> Process:
        sizes = self.sizes
        if step.number and len(step.cols) and sizes.kv_itemsize != sizes.itemsize:
            numbers = len(step.cols) * sizes.batch * self.numbers
            yield from self.kernel(
                self.machine.pack(float(numbers * (sizes.kv_itemsize + sizes.itemsize)))
            )

    # Sizes

    def kept(self, num_tokens: int, room: int | None) -> Kept:
        is_wide = self.sizes.itemsize >= 4
        return Kept(num_tokens * self.sizes.batch, is_wide, not self.machine.host_waits, room)

    def rows(self, of: tuple[int, int]) -> int:
        return of[0] * self.sizes.itemsize + of[1] * max(4, self.sizes.itemsize)

    def of_query(self, of: tuple[int, int]) -> int:
        return self.rows(of) * self.heads[0] * self.sizes.head_dims[0]

    def of_keys(self, of: tuple[int, int]) -> int:
        return self.rows(of) * self.numbers

    def launches(self, step: Step) -> Iterator[tuple[int, int, float]]:
        """Rows, columns and seconds of each launch."""
        batch = self.sizes.batch
        shape = batch, self.plan.num_local[0], len(step.cols)
        for launch in launches(step, shape, self.o.segments):
            repeats = len(range(batch)[launch.rows[0]])
            rows = repeats * len(range(shape[1])[launch.rows[2]])
            cols = repeats * len(range(shape[2])[launch.cols[2]])
            tiles = [((0, rows // repeats), (0, cols // repeats))] * repeats
            if launch.segments is not None:
                of_rows, of_cols = launch.segments.rows, launch.segments.cols
                tiles = [
                    ((of_rows[i], of_rows[i + 1]), (of_cols[i], of_cols[i + 1]))
                    for i in range(len(of_rows) - 1)
                ]
            pairs = sum(Tile(*tile, launch.mask).area for tile in tiles)
            bounds = [x for x in (launch.mask.left, launch.mask.right) if x is not None]
            form = ("full", "causal", "window")[len(bounds)]
            head_dim = self.sizes.head_dims[0]
            kernel, heads = self.o.problem.kernel, self.heads[0]
            speed = self.machine.speed(self.o.problem.dtype, head_dim, form, kernel, heads)
            flops = float(pairs * self.heads[0] * head_dim)
            backward = self.o.is_backward
            yield rows, cols, speed.backward(10 * flops) if backward else speed.forward(4 * flops)

    # Messages

    def of_message(self, peer: int, cols: int, itemsize: int, is_own: bool) -> tuple[float, float]:
        """Latency of a message, and how long it takes the ports."""
        curve = self.o.links(self.rank, peer)[1].p2p
        num_bytes = cols * self.sizes.batch * self.numbers * itemsize
        count = 2 if is_own and num_bytes >= LARGE else 1
        return curve(0.0), count * (curve(num_bytes / count) - curve(0.0))

    def load(self, hop: Hop, itemsize: int) -> float:
        sides = [
            sum(
                sum(self.of_message(x.peer, len(x.cols), itemsize, x.source == owner(x)))
                for x in side
            )
            for side, owner in ((hop.sends, lambda x: self.rank), (hop.receives, lambda x: x.peer))
        ]
        return max(sides)

    def factors(self, number: int) -> tuple[float, float]:
        """How many times longer kernels and transfers of a step take."""
        if number not in self.known_factors:
            self.known_factors[number] = self.factors_of(number)
        return self.known_factors[number]

    def factors_of(self, number: int) -> tuple[float, float]:
        if number >= len(self.plan.steps):
            kernels, hop = 0.0, Hop()
        else:
            kernels = sum(seconds for *_, seconds in self.launches(self.plan.steps[number]))
            hop = self.plan.shards[number]
        transfers = self.load(hop, self.sizes.kv_itemsize)
        if self.o.is_backward and number:
            transfers += self.load(self.plan.sums[number - 1], self.sizes.sum_itemsize)
        if not kernels or not transfers:
            return 1.0, 1.0
        slow, slower = self.machine.beside_transfer, self.machine.beside_kernel
        if kernels * slow <= transfers * slower:  # the kernels end first
            rest = transfers - kernels * slow / slower
            return slow, (kernels * slow + rest) / transfers
        rest = kernels - transfers * slower / slow
        return (transfers * slower + rest) / kernels, slower

    def packs(self, kind: str, number: int, hop: Hop) -> Iterator[float]:
        """Seconds of each copy before a hop."""
        sizes, copied = self.sizes, dict[Any, int]()
        itemsize = sizes.kv_itemsize if kind == "shards" else sizes.sum_itemsize
        resident = {x.source: x.cols for one in self.plan.shards for x in one.receives}
        for x in sorted(hop.sends, key=lambda x: (x.peer - self.rank) % len(self.o.plans)):
            numbers = len(x.cols) * sizes.batch * self.numbers
            if x.source == self.rank:
                is_one = len(x.cols.spans) == 1 and (
                    sizes.batch == 1 or len(x.cols) == self.plan.num_local[1]
                )
                if is_one and numbers * itemsize >= LARGE and itemsize == sizes.itemsize:
                    continue
                copied[x.source, x.cols] = numbers * (itemsize + sizes.itemsize)
            elif x.cols != resident[x.source]:
                copied[x.source, x.cols] = 2 * numbers * itemsize
        for num_bytes in copied.values():
            yield self.machine.pack(float(num_bytes))

    def start(self, kind: str, number: int, hop: Hop) -> Generator[Any, Any, simpy.Event]:
        """Pack and post a hop; the event is when all of its messages are done."""
        for seconds in self.packs(kind, number, hop):
            yield from self.kernel(seconds)
        if not hop.moves:
            return self.env.event().succeed()
        yield self.env.timeout(self.machine.hop)
        size = len(self.o.plans)
        parts = [("s", x, (x.peer - self.rank) % size) for x in hop.sends]
        parts += [("r", x, (self.rank - x.peer) % size) for x in hop.receives]
        ends = []
        for side, x, _ in sorted(parts, key=lambda part: part[2]):
            pair = (self.rank, x.peer) if side == "s" else (x.peer, self.rank)
            ends.append(self.ends((kind, number, *pair, x.source)))
        self.env.process(self.post(kind, number, parts, self.stream.put()))
        return simpy.AllOf(self.env, ends)

    def ends(self, key: Any) -> simpy.Event:
        """When a message of two ranks is done; the first of them makes it."""
        if key not in self.o.messages:
            ready = [self.env.event(), self.env.event()]
            self.o.messages[key] = ready, self.env.event()
            self.env.process(self.message(key, ready, self.o.messages[key][1]))
        return self.o.messages[key][1]

    def post(self, kind: str, number: int, parts: Sequence[Any], posted: simpy.Event) -> Process:
        yield posted
        used = dict[Any, list[tuple[Any, float]]]()
        for side, x, _ in parts:
            pair = (self.rank, x.peer) if side == "s" else (x.peer, self.rank)
            message = kind, number, *pair, x.source
            port = side, self.o.links(*pair)[0]
            used.setdefault(port, []).append((message, self.times(message)[1]))
        for (side, level), messages in used.items():
            # Asked for now, so that a port serves hops in the order of the code.
            request = self.o.ports[side, level, self.rank].request()
            self.env.process(self.hold(request, side, messages))

    def hold(self, request: Any, side: str, messages: list[tuple[Any, float]]) -> Process:
        """Take a port until all messages that share it have had their time."""
        yield request
        load, begun = sum(busy for _, busy in messages), []
        for message, _ in messages:
            ready, _ = self.o.messages[message]
            ready["sr".index(side)].succeed(load)
            begun.append(simpy.AllOf(self.env, ready))
        yield simpy.AllOf(self.env, begun)
        yield self.env.timeout(load)
        request.resource.release(request)

    def times(self, key: Any) -> tuple[float, float]:
        """How long a message is under way beside its ports, and how long it takes them."""
        kind, number, sender, receiver, source = key
        one, other = (self.o.ranks[rank] for rank in (sender, receiver))
        sends = (one.plan.shards if kind == "shards" else one.plan.sums)[number].sends
        cols = next(x.cols for x in sends if (x.peer, x.source) == (receiver, source))
        itemsize = self.sizes.kv_itemsize if kind == "shards" else self.sizes.sum_itemsize
        latency, busy = one.of_message(receiver, len(cols), itemsize, source == sender)
        beside = number if kind == "shards" else number + 1
        factor = max(one.factors(beside)[1], other.factors(beside)[1])
        return latency * factor, busy * factor

    def message(self, key: Any, ready: list[simpy.Event], done: simpy.Event) -> Process:
        loads = yield simpy.AllOf(self.env, ready)
        yield self.env.timeout(max(loads.values()) + self.times(key)[0])
        done.succeed()

    # All-to-alls

    def tensors(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Heads and head dims of the output, and of query, key and value."""
        (heads, key_heads), (head_dim, value_dim) = self.sizes.heads, self.sizes.head_dims
        inputs = [(heads, head_dim), (key_heads, head_dim), (key_heads, value_dim)]
        return [(heads, value_dim)], inputs

    def exchange(self, tensors: list[tuple[int, int]], is_back: bool) -> Process:
        if self.o.strategy.heads == 1:
            return
        one, key_heads, token = self.o.exchanges[self.rank], self.sizes.heads[1], 0
        leaving, coming = dict[int, int](), dict[int, int]()
        for number, (heads, head_dim) in enumerate(tensors):
            is_rounded = number and not is_back and self.sizes.kv_dtype in QUANTISED
            itemsize = self.sizes.kv_itemsize if is_rounded else self.sizes.itemsize
            scale = head_dim * self.sizes.batch * itemsize
            own = one.head_shard(self.rank, key_heads).span(heads, key_heads)
            for x in one.sends:
                first, end = one.head_shard(x.peer, key_heads).span(heads, key_heads)
                leaving[x.peer] = leaving.get(x.peer, 0) + len(x.cols) * (end - first) * scale
            for x in one.receives:
                size = len(x.cols) * (own[1] - own[0]) * scale
                coming[x.peer] = coming.get(x.peer, 0) + size
            token += (own[1] - own[0]) * scale
        for amounts in (leaving, coming):
            amounts.pop(self.rank, None)
        if is_back:
            leaving, coming = coming, leaving
        kept = one.num_tokens[0] * token
        levels = [[0, 0], [0, 0]]
        for side, amounts in enumerate((leaving, coming)):
            for peer, size in amounts.items():
                levels[self.o.links(self.rank, peer)[0]][side] += size
        links = self.machine.inside, self.machine.between
        seconds = max(
            [x.all_to_all(float(max(y))) for x, y in zip(links, levels, strict=True) if max(y)],
            default=0.0,
        )
        pack, sent, received = self.machine.pack, sum(leaving.values()), sum(coming.values())
        if sent:
            yield from self.kernel(pack(2.0 * sent))
        done = self.env.event().succeed()
        if sent or received:
            yield self.env.timeout(self.machine.hop)
            done = self.barrier(is_back, seconds, self.stream.put())
        if kept:
            yield from self.kernel(pack(2.0 * kept))
        yield from self.wait(done)
        if received:
            yield from self.kernel(pack(2.0 * received))

    def barrier(self, is_back: bool, seconds: float, posted: simpy.Event) -> simpy.Event:
        """When the all-to-all of this rank's group is done."""
        heads = self.o.strategy.heads
        key = is_back, self.rank // heads
        if key not in self.o.barriers:
            self.o.barriers[key] = self.env.event(), [self.env.event() for _ in range(heads)]
            self.env.process(self.together(*self.o.barriers[key]))
        done, arrived = self.o.barriers[key]
        self.env.process(self.arrive(posted, arrived[self.rank % heads], seconds))
        return done

    def arrive(self, posted: simpy.Event, arrived: simpy.Event, seconds: float) -> Process:
        yield posted
        arrived.succeed(seconds)

    def together(self, done: simpy.Event, arrived: list[simpy.Event]) -> Process:
        # All members move something, or none does: an empty group has no barrier.
        seconds = yield simpy.AllOf(self.env, arrived)
        yield self.env.timeout(max(seconds.values()))
        done.succeed()
