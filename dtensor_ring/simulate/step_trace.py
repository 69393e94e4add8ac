"""A simulated step as a trace that Perfetto and `chrome://tracing` open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dtensor_ring.simulate.overlap import COLLECTIVE
from dtensor_ring.simulate.step import SimulatedStep


def step_trace(step: SimulatedStep) -> dict[str, Any]:
    """Return a trace of the streams of a rank, in the JSON format of Chrome's trace events.

    Times are in microseconds. Process 0 is the step.

    Args:
        step: the simulated step.
    """
    return {"traceEvents": [*_events(step)], "displayTimeUnit": "ms"}


def _events(step: SimulatedStep) -> Iterator[dict[str, Any]]:
    yield named("process_name", 0, 0, f"{step.model}, {step.strategy}")
    for stream, name in enumerate(("kernels", "FSDP2")):
        yield named("thread_name", 0, stream, name)
    for span in step.spans:
        yield {
            "name": span.label,
            "cat": "collective" if span.stream == COLLECTIVE else "kernels",
            "ph": "X",
            "pid": 0,
            "tid": span.stream,
            "ts": span.begin * 1e6,
            "dur": (span.end - span.begin) * 1e6,
        }


def named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread."""
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
