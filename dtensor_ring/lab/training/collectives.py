"""Seconds of collectives of a group, and when they and kernels run, as FSDP2 overlaps them.

Note [Overlap]: FSDP2 gathers the parameters of the next layer while one computes, and reduces the
gradients of a layer while the next one computes its own. All its collectives use one communicator,
whose collectives run one after the other, in the order in which the host calls them. So a step has
two streams, computing and communicating, each a queue. A task waits for the one ahead of it in its
queue, and for those that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from dtensor_ring.lab.machine import Curve, Links, Machine

# What moves, by the names of `Links`.
Kind = Literal["all_gather", "reduce_scatter"]


class RankGroup(NamedTuple):
    """Ranks of a collective.

    Attributes:
        ranks: number of ranks.
        per_host: number of them on one host.
    """

    ranks: int
    per_host: int

    @property
    def hosts(self) -> int:
        """Number of hosts that have ranks of the group."""
        return -(-self.ranks // self.per_host)


def rank_group(machine: Machine, ranks: int, stride: int = 1) -> RankGroup:
    """Return a group of ranks at a distance, as meshes have them.

    Args:
        machine: has `ranks_per_host` ranks in a row on a host.
        ranks: number of ranks.
        stride: ranks from one member of the group to the next.
    """
    return RankGroup(ranks, max(1, min(ranks, machine.ranks_per_host // stride)))


def strided(machine: Machine, stride: int) -> Machine:
    """Return a machine as an axis sees it whose neighbours are `stride` ranks apart."""
    return replace(machine, ranks_per_host=max(1, machine.ranks_per_host // stride))


def collective_seconds(machine: Machine, group: RankGroup, kind: Kind, size: float) -> float:
    """Return the seconds of an all-gather or reduce-scatter.

    Rings pass through all ranks of a host before they leave it, one ring for each rank of the host,
    so every port carries the same part. Links inside and between hosts work at the same time. Each
    host adds the latency of a message, as in NCCL's own model (`src/graph/tuning.cc`).

    Args:
        machine: the machine.
        group: the ranks.
        kind: the collective.
        size: bytes of the whole, which each rank has after a gather and before a reduction.
    """
    if group.ranks == 1 or not size:
        return 0.0
    within = _of(machine.inside, kind)(size * (group.ranks - 1) / group.ranks)
    if group.hosts == 1:
        return within
    crossing = size * (group.hosts - 1) / group.hosts / group.per_host
    # The curve has the latency of one crossing.
    later = (group.hosts - 2) * machine.between.p2p(0.0)
    across = _of(machine.between, kind)(crossing) + later
    return max(across, within) if group.per_host > 1 else across


def all_reduce_seconds(machine: Machine, group: RankGroup, size: float) -> float:
    """Return the seconds of an all-reduce, which is a reduction and a gather."""
    parts = [collective_seconds(machine, group, kind, size) for kind in _BOTH]
    return sum(parts)


_BOTH: tuple[Kind, Kind] = ("reduce_scatter", "all_gather")


def _of(links: Links, kind: Kind) -> Curve:
    return links.all_gather if kind == "all_gather" else links.reduce_scatter


COMPUTE, COLLECTIVE = 0, 1


class Task(NamedTuple):
    """Something that a stream does.

    Attributes:
        label: what it is.
        stream: `COMPUTE` or `COLLECTIVE`.
        seconds: what it takes alone.
        after: numbers of the tasks that end before it begins.
    """

    label: str
    stream: int
    seconds: float
    after: tuple[int, ...] = ()


class TaskSpan(NamedTuple):
    """When a task ran, in seconds from the beginning."""

    label: str
    stream: int
    begin: float
    end: float


class UnitSeconds(NamedTuple):
    """What FSDP2 gathers at once, such as a layer; times are in seconds.

    Attributes:
        label: name of the unit.
        forward: kernels of its forward.
        backward: kernels of its backward, and what that computes again.
        gather: gathering its parameters.
        reduce: reducing its gradients.
    """

    label: str
    forward: float
    backward: float
    gather: float
    reduce: float


def fsdp_tasks(units: Sequence[UnitSeconds]) -> list[Task]:
    """Return the tasks of a step in the order in which the host starts them.

    The last unit is not gathered again for its backward, which begins at once. Collectives that
    take no time, as those of a single rank, are left out.

    Args:
        units: from the first to the last of the forward.

    >>> [task.label for task in fsdp_tasks([UnitSeconds("layer", 2.0, 4.0, 1.0, 1.0)])]
    ['gather layer', 'forward layer', 'backward layer', 'reduce layer']
    """
    queue = _Queue()
    for unit in units:
        queue.gather(unit)
        queue.compute(f"forward {unit.label}", unit.forward)
    last: UnitSeconds | None = None
    for unit in reversed(units):
        if last is not None:
            queue.gather(unit)  # called before the reduction, as the unit before has begun
            queue.reduce(last)
        queue.compute(f"backward {unit.label}", unit.backward)
        last = unit
    if last is not None:
        queue.reduce(last)
    return queue.tasks


class _Queue:
    """Tasks so far, and what the next ones need."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._needed: tuple[int, ...] = ()  # by the kernels that were added last
        self._computed: tuple[int, ...] = ()  # these kernels
        self._gathered: tuple[int, ...] = ()

    def gather(self, unit: UnitSeconds) -> None:
        # A gather begins with the kernels of the unit before, so it waits for the same tasks.
        self._gathered = self._add(f"gather {unit.label}", COLLECTIVE, unit.gather, self._needed)

    def reduce(self, unit: UnitSeconds) -> None:
        self._add(f"reduce {unit.label}", COLLECTIVE, unit.reduce, self._computed)

    def compute(self, label: str, seconds: float) -> None:
        self._needed = self._computed + self._gathered
        self.tasks.append(Task(label, COMPUTE, seconds, self._needed))
        self._computed, self._gathered = (len(self.tasks) - 1,), ()

    def _add(
        self, label: str, stream: int, seconds: float, after: tuple[int, ...]
    ) -> tuple[int, ...]:
        if not seconds:
            return ()
        self.tasks.append(Task(label, stream, seconds, after))
        return (len(self.tasks) - 1,)


def run_streams(
    tasks: Sequence[Task], kernel_factor: float = 1.0, collective_factor: float = 1.0
) -> list[TaskSpan]:
    """Return when tasks run, in their order; see Note [Overlap].

    Args:
        tasks: in the order of each stream.
        kernel_factor: how many times longer kernels take while a collective runs.
        collective_factor: how many times longer collectives take while kernels run.

    Raises:
        ValueError: if tasks wait for one another.

    >>> tasks = [Task("gather", COLLECTIVE, 2.0), Task("layer", COMPUTE, 3.0, (0,))]
    >>> [(span.begin, span.end) for span in run_streams(tasks)]
    [(0.0, 2.0), (2.0, 5.0)]
    """
    factors = kernel_factor, collective_factor
    queues = [[i for i, x in enumerate(tasks) if x.stream == stream] for stream in _STREAMS]
    heads, left = [0, 0], [x.seconds for x in tasks]
    begins, ends, now = {}, {}, 0.0
    while len(ends) < len(tasks):
        ready = [
            queue[head]
            for queue, head in zip(queues, heads, strict=True)
            if head < len(queue) and all(i in ends for i in tasks[queue[head]].after)
        ]
        if not ready:
            raise ValueError("tasks wait for one another, so none can begin")
        # Alone a task advances at full speed; beside the other stream, each slows the other.
        slow = {i: factors[tasks[i].stream] if len(ready) == 2 else 1.0 for i in ready}
        passed = min(left[i] * slow[i] for i in ready)
        for i in ready:
            begins.setdefault(i, now)
            left[i] -= passed / slow[i]
        now += passed
        for i in ready:
            if left[i] <= 1e-12 * tasks[i].seconds:
                ends[i] = now
                heads[tasks[i].stream] += 1
    return [TaskSpan(x.label, x.stream, begins[i], ends[i]) for i, x in enumerate(tasks)]


_STREAMS = COMPUTE, COLLECTIVE
