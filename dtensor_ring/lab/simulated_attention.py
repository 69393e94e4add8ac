"""Simulate one attention on a machine: what each rank does when, and the total."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Unpack

from dtensor_ring.compute.kernels.registry import KERNELS
from dtensor_ring.lab.clock import Spans
from dtensor_ring.lab.machine import FORMS, Machine
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.problem import ProblemOptions, SimulatedProblem, problem_of, refuse_unknown
from dtensor_ring.lab.recorded_ranks import RecordedRanks
from dtensor_ring.lab.replay import Direction, KernelSeconds, least_alone, least_tiles, replayed
from dtensor_ring.planning.mask import Boundaries, Mask
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.transport.transport import TransferPolicy


def timeline_of(
    problem: SimulatedProblem, strategy: Strategy, machine: Machine, keeps_spans: bool = False
) -> Timeline:
    """Return the times of a problem by one strategy that can run it, see `Simulation`."""
    return Simulation(problem, strategy, machine, keeps_spans).timeline()


class Span(NamedTuple):
    """What one rank does once.

    Attributes:
        rank: who does it.
        stream: one of `STREAMS`.
        label: as in a profile, such as "ring forward, step 0, source 1: tile".
        begin, end: seconds since the forward began; the backward follows it.
    """

    rank: int
    stream: str
    label: str
    begin: float
    end: float


# The rows of a rank in a picture, in this order.
STREAMS = ("host", "compute", "send", "receive")


@dataclass(frozen=True)
class Timeline:
    """The times of one attention, forward and backward. Printed, it is two lines.

    Both directions begin on all ranks at once; the backward begins when the last forward has ended.

    Attributes:
        machine: name of the machine.
        strategy: spec of the strategy.
        forward: times of the forward by rank.
        backward: likewise.
        num_planned: ranks that were looked at; others are taken to be like the nearest of those.
    """

    machine: str
    strategy: str
    forward: Direction = field(repr=False)
    backward: Direction = field(repr=False)
    num_planned: int = 0

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds until the last rank is done, forward and backward."""
        forward, backward = (float(x.ends.max()) for x in (self.forward, self.backward))
        return forward, backward

    @property
    def total(self) -> float:
        """Seconds of forward and backward together."""
        return sum(self.seconds)

    @property
    def exposed(self) -> tuple[float, float]:
        """Seconds in which the kernels of the rank that waits longest wait for messages."""
        forward, backward = (float(x.waited.max()) for x in (self.forward, self.backward))
        return forward, backward

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes that the busiest rank sends, forward and backward."""
        forward, backward = (int(x.sent.max()) for x in (self.forward, self.backward))
        return forward, backward

    def __str__(self) -> str:
        lines = [f"{self.strategy} on {self.machine}, of the slowest rank:"]
        rows = zip(("forward", "backward"), self.seconds, self.exposed, self.num_bytes, strict=True)
        for name, seconds, exposed, size in rows:
            lines.append(
                f"{name:<8} {1e3 * seconds:10.3f} ms, {1e3 * exposed:9.3f} ms of it waiting for "
                f"messages, {size / 1e6:.1f} MB sent"
            )
        if self.num_planned < (size := len(self.forward.ends)):
            lines.append(f"from {self.num_planned} of {size} ranks; others are like the nearest")
        return "\n".join(lines)

    def spans(self, ranks: Collection[int] | None = None) -> Iterator[Span]:
        """Yield what ranks do, in the order of the code.

        Args:
            ranks: which ranks; by default all.
        """
        starts = 0.0, self.seconds[0]
        for of, start in zip((self.forward, self.backward), starts, strict=True):
            for spans in of.spans:
                yield from _spans(spans, start, ranks)

    def chrome_trace(self, ranks: Collection[int] | None = None) -> str:
        """Return the spans as JSON that Perfetto and chrome://tracing open, a process by rank.

        Args:
            ranks: which ranks; by default all.
        """
        events: list[dict[str, Any]] = []
        known: set[int] = set()
        for span in self.spans(ranks):
            if span.rank not in known:
                known.add(span.rank)
                events += _names(span.rank)
            place = {"pid": span.rank, "tid": STREAMS.index(span.stream)}
            # Microseconds.
            times = {"ts": 1e6 * span.begin, "dur": 1e6 * (span.end - span.begin)}
            events.append({"ph": "X", "name": span.label, "cat": span.stream, **place, **times})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _spans(spans: Spans, start: float, ranks: Collection[int] | None) -> Iterator[Span]:
    """Yield spans of some ranks."""
    where = slice(None) if ranks is None else np.isin(spans.ranks, list(ranks))
    rows = (x[where].tolist() for x in (spans.ranks, spans.sources, spans.begins, spans.ends))
    for rank, source, begin, end in zip(*rows, strict=True):
        label = f"ring {spans.ring}, step {spans.step}, source {source}: {spans.what}"
        yield Span(rank, spans.stream, label, start + begin, start + end)


def _names(rank: int) -> Iterator[dict[str, Any]]:
    """Yield the events that name a rank and its streams."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for number, stream in enumerate(STREAMS):
        place = {"pid": rank, "tid": number}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": stream}}


def simulate_attention(
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    cu_seqlens: Boundaries | None = None,
    *,
    strategy: Strategy | str = Strategy.default,
    machine: Machine | str | PathLike[str] = "h100",
    **options: Unpack[ProblemOptions],
) -> Timeline:
    """Simulate the forward and the backward of one attention on a machine, without running it.

    Ranks of a host are consecutive ranks of the axis. Of a host whose devices are also used by
    other axes, give a machine with fewer `ranks_per_host`.

    Args:
        mask: which keys a query sees; `None` where `slices` say it.
        seq_len: global length, in tokens.
        world_size: ranks of the axis.
        heads: of queries, and of keys and values; with tensor parallelism, those of a rank.
        head_dim: of queries, keys and values.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence.
        strategy: how the attention is made parallel, see `SequenceAxis`.
        machine: a preset's name, such as "h100", a file that `python -m dtensor_ring calibrate`
            wrote, or a `Machine`.
        options: `slices`, what queries see in place of mask and boundaries; `layout`, a layout or
            its name, by default "zigzag"; `batch`, rows of the batch, if boundaries do not say it;
            `dtype` of query, key and value, or its name, by default bfloat16; `policy`, the dtypes
            in which messages travel; `kernel`, the name of a registered one, by default the first
            that the machine has.

    Returns:
        A `Timeline`; print it, or save its `chrome_trace()`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the machine is unknown or lacks the kernel or the dtype, or the strategy or
            layout is unknown, does not fit the axis or the length, or there are too few heads.

    Example:
        >>> from dtensor_ring.lab.machine import Curve, KernelSpeed, Links, Machine
        >>> link, copy, kernel = (Curve.line(1e-5, rate) for rate in (1e11, 2e12, 5e14))
        >>> speed = KernelSpeed("any", "bfloat16", 128, "full", kernel, kernel)
        >>> links = Links(link, link, link, link)
        >>> machine = Machine("mine", "cuda", "data sheet", 8, 80 * 2**30, (speed,), {}, 2e12, copy,
        ...     copy, links, links)
        >>> found = simulate_attention(Mask.causal(), 65536, 8, machine=machine)
        >>> [round(1e3 * seconds, 2) for seconds in found.seconds]
        [9.33, 23.81]
    """
    refuse_unknown(simulate_attention, options)
    if isinstance(policy := options.get("policy"), TransferPolicy):
        policy.refuse_order("simulate_attention")
    problem = problem_of(mask, seq_len, world_size, heads, head_dim, cu_seqlens, **options)
    return timeline_of(problem, problem.able(strategy), as_machine(machine), keeps_spans=True)


class Simulation:
    """An attention by a strategy that can run it; a direction is simulated when it is asked for.

    Args:
        problem: the attention.
        strategy: how it is made parallel.
        machine: what each part takes.
        keeps_spans: whether to keep what each rank does when.
        known: what was simulated of this problem, by content; strategies may do the same.

    Raises:
        ValueError: if the machine lacks the kernel or the dtype.
    """

    def __init__(
        self,
        problem: SimulatedProblem,
        strategy: Strategy,
        machine: Machine,
        keeps_spans: bool = False,
        known: dict[Hashable, Any] | None = None,
    ) -> None:
        self._names, self._keeps_spans = (machine.name, strategy.spec), keeps_spans
        self._known: dict[Hashable, Any] = {} if known is None else known
        # All tiles of an attention have one kernel.
        kernel = problem.kernel or machine.kernel_for(problem.dtype, problem.is_banded)
        head_dim = problem.sizes.head_dims[0]
        self._kernels = KernelSeconds(machine, problem.dtype, head_dim, kernel)
        of_kernel = machine.speed(problem.dtype, head_dim, FORMS[-1], kernel).kernel
        on_gpu = not machine.host_waits
        self._ranks = RecordedRanks(problem, strategy, has_segments(of_kernel), on_gpu)

    def direction(self, is_forward: bool) -> Direction:
        """Return the times of the forward, or of the backward."""
        content = self._ranks.content
        return self._once(replayed, content, is_forward, keeps_spans=self._keeps_spans)

    def _least(self, is_forward: bool) -> float:
        """Return what a direction takes at least."""
        return self._once(least_alone, self._ranks.last.content, is_forward)

    def _once(
        self, compute: Callable[..., Any], content: Hashable, is_forward: bool, **how: bool
    ) -> Any:
        """Return what is computed of a direction of these ranks; strategies share what is known."""
        key = compute, content, is_forward
        if key not in self._known:
            self._known[key] = compute(self._ranks, self._kernels, is_forward, **how)
        return self._known[key]

    def bounds(self) -> Iterator[float]:
        """Yield what it takes at least, with ever more of it simulated, and last what it takes."""
        yield least_tiles(self._ranks, self._kernels)
        yield self._least(True) + self._least(False)
        yield self.timeline().total

    def timeline(self) -> Timeline:
        """Return the times of both directions."""
        forward, backward = self.direction(True), self.direction(False)
        machine, strategy = self._names
        return Timeline(machine, strategy, forward, backward, self._ranks.num_planned)


def has_segments(kernel: str) -> bool:
    """Return whether a kernel joins tiles; "any" and kernels that are not known here do.

    Tiles that one launch of intervals takes are counted as segments.
    """
    known = KERNELS.get(kernel)
    return known is None or known.has_segments or known.has_intervals
