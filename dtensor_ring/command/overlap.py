"""How much of the time of messages is hidden behind the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring.command.finding import Finding
from dtensor_ring.command.ranks import Ranks
from dtensor_ring.command.silent import Silent
from dtensor_ring.compute.kernels import Scores, kernel_for
from dtensor_ring.ops.options import default_scale
from dtensor_ring.planning.layouts.spelling import as_layout
from dtensor_ring.planning.masks.mask import Mask
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.ring import ring_forward
from dtensor_ring.transport.process_group import ProcessGroupTransport
from dtensor_ring.transport.protocol import P2P, Transport, Work

SHAPE = 1, 8, 2048, 64
"""Of a rank's query, key and value."""

REPEATS = 5


class Again(Transport):
    """Notes the messages of a ring, and sends them again without the ring."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._hops: list[tuple[list[P2P], list[P2P]]] = []

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        self._hops.append((receives, sends))
        return self._transport.start(receives, sends)

    def send(self) -> None:
        """Send all messages, one hop after the other."""
        for receives, sends in self._hops:
            for work in self._transport.start(receives, sends):
                work.wait()


def overlap(ranks: Ranks, kernel: str | None, layout: str) -> Finding:
    """Compare a causal ring forward with itself without messages, and with its messages alone."""
    mesh, device, dtype = ranks
    size, rank = mesh.size(), mesh.get_local_rank()
    shard = [torch.randn(SHAPE, device=device).to(dtype) for _ in range(3)]
    mine = plan(as_layout(layout), Mask.causal(), rank, size, SHAPE[2] * size)
    transport = ProcessGroupTransport(mesh.get_group())
    again = Again(transport)
    again.prepare(device)
    ring = _ring(shard, mine, kernel)
    ring(again)  # it notes the messages, and warms up
    calls = [lambda: ring(transport), lambda: ring(Silent()), again.send]
    whole, kernels, messages = _milliseconds(calls, device)
    found = f"{whole:.1f} ms; {kernels:.1f} without messages, which take {messages:.1f} alone"
    exposed = max(0.0, whole - kernels)
    if exposed < messages / 2:
        return Finding("overlap", f"{found}: hidden")
    return Finding("overlap", f"{found}: exposed", _advice(device))


def _ring(shard: list[Tensor], mine: Plan, kernel: str | None) -> Callable[[Transport], object]:
    """A function that runs the ring by a transport."""
    query, key, value = shard
    scores = Scores(Mask.causal(), default_scale(SHAPE[3]))
    facts = query.dtype, SHAPE[3], SHAPE[3], scores.scale, 0.0, False, False, False, False
    chosen = kernel_for(kernel, query.device.type, *facts)
    return lambda transport: ring_forward(query, (key, value), mine, chosen, scores, transport)


def _milliseconds(calls: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Of each call, timed in turns after all ranks have met."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for times, call in zip(seconds, calls, strict=True):
            dist.barrier()
            begin = _now(device)
            call()
            times.append(_now(device) - begin)
    return [1000 * median(times) for times in seconds]


def _now(device: torch.device) -> float:
    """The time when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _advice(device: torch.device) -> str:
    if device.type == "cuda":
        return "longer shards hide more; see docs/profiling.md"
    return "messages over gloo take the cores that compute: give each rank one more"
