"""What each rank does when: totals, spans with the labels of profiles, and Chrome traces."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dtensor_ring.simulate.clock import Spans
from dtensor_ring.simulate.recurrence import Direction

# The rows of a rank in a picture, in this order.
STREAMS = ("host", "compute", "send", "receive")


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


@dataclass(frozen=True)
class Timeline:
    """The times of one attention, forward and backward. Printed, it is two lines.

    Both directions begin on all ranks at once; the backward begins when the last forward has ended.

    Attributes:
        machine: name of the machine.
        strategy: spec of the strategy.
        forward: times of the forward by rank.
        backward: likewise.
    """

    machine: str
    strategy: str
    forward: Direction = field(repr=False)
    backward: Direction = field(repr=False)

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
