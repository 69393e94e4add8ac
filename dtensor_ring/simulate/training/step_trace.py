"""A simulated step as a trace that Perfetto and `chrome://tracing` open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dtensor_ring.simulate.training.overlap import COLLECTIVE
from dtensor_ring.simulate.training.step import SimulatedStep


def step_trace(step: SimulatedStep) -> dict[str, Any]:
    """Return a trace of a step, in the JSON format of Chrome's trace events.

    Times are in microseconds. Process 0 has the streams of a rank in the whole step. Each kind of
    attention follows with a process for each rank of its axis, in one forward and one backward.

    Args:
        step: the simulated step.
    """
    events, process = [*_events(step)], 1
    for mask, attention in step.attentions.items():
        found = json.loads(attention.timeline.chrome_trace())["traceEvents"]
        events += [_moved(event, process, mask) for event in found]
        process += 1 + max((event["pid"] for event in found), default=0)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _moved(event: dict[str, Any], process: int, mask: str) -> dict[str, Any]:
    """Return an event of an attention in a process of its own, whose name has the mask."""
    event = event | {"pid": event["pid"] + process}
    if event["name"] == "process_name":
        event["args"] = {"name": f"attention, {mask}, {event['args']['name']}"}
    return event


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
