"""Measures a machine: what its ranks compute, what moves bytes between them, and what it is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import date
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring.lab.calibrate.calibrate_kernels import (
    CalibratedProblem,
    TileSeries,
    kernel_points,
    launch_seconds,
    measure_elements,
    measure_matrices,
    measure_memory,
    merge_points,
    pack_points,
    tile_series,
)
from dtensor_ring.lab.calibrate.stopwatch import Call, Points, Series, Stopwatch
from dtensor_ring.lab.machine import Curve, Links, Machine
from dtensor_ring.lab.presets import PRESETS
from dtensor_ring.lab.report import versions
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, Work

# Bytes of a message, or of all messages of a rank.
BYTES = (2**10, *(4**n for n in range(7, 15)))

# The axes of the mesh: hosts, and the ranks of each host.
BETWEEN, INSIDE = "between", "inside"


def measure_machine(
    name: str,
    watch: Stopwatch,
    mesh: dist.DeviceMesh,
    problem: CalibratedProblem,
    others: Sequence[CalibratedProblem] = (),
) -> Machine:
    """Measure kernels and links of a machine; all ranks of the default process group call this.

    Links that no ranks have are those of the preset of this device. Without one, hosts are
    connected as the ranks of one host are, and a rank alone as its own memory is.

    Args:
        name: of the machine.
        watch: times the calls of all ranks.
        mesh: the axes `BETWEEN` and `INSIDE`, in this order.
        problem: the attention that is measured.
        others: attentions with other head dims, of which kernels alone are measured.

    Returns:
        The machine, with the same times on all ranks.

    Raises:
        ValueError: if no kernel serves the problem.
    """
    launch, rate, device = launch_seconds(watch, problem), measure_memory(watch), watch.device
    axes = {
        axis: TimedMessages(mesh.get_group(axis), device)
        for axis in (BETWEEN, INSIDE)
        if mesh[axis].size() > 1
    }
    tiles = tile_series(problem, others, device)
    points = kernel_points(tiles, device)
    points |= {"merge": merge_points(problem, device), "pack": pack_points(problem, device)}
    cold = {f"{kind} {x}": of for x in axes for kind, of in link_points(axes[x]).items()}
    times = watch.measure(points | cold, cold)
    host_waits = not watch.on_gpu
    # Only where the host waits are its seconds part of what was measured.
    in_launch = launch if host_waits else 0.0
    measured = {x: _measured_links(watch, axes[x], problem, x, times) for x in axes}
    name_here = torch.cuda.get_device_name(device) if watch.on_gpu else device.type
    links, sources = _all_links(measured, name_here, rate)
    facts = {"heads": problem.heads, "hosts": mesh[BETWEEN].size(), "links": sources}
    facts |= {"beside": {axis: x.beside for axis, x in measured.items()}}
    facts |= {"threads": torch.get_num_threads(), **times}
    # An axis over several hosts waits for the messages between them.
    slowest = next(iter(measured.values()), None)
    return Machine(
        name=name,
        device=name_here,
        source="measured",
        ranks_per_host=mesh[INSIDE].size(),
        memory=_memory(device, mesh[INSIDE].size()),
        kernels=tuple(x.speed(times, in_launch) for x in tiles),
        gemm=measure_matrices(watch, [problem.dtype, torch.float32]),
        memory_rate=rate,
        element_rate=measure_elements(watch),
        merge=times["merge"].curve(in_launch),
        pack=times["pack"].curve(in_launch),
        inside=links[INSIDE],
        between=links[BETWEEN],
        beside_kernel=slowest.beside_kernel if slowest else 1.0,
        beside_transfer=slowest.beside_transfer if slowest else 1.0,
        launch=launch,
        hop=slowest.hop if slowest else 0.0,
        host_waits=host_waits,
        date=date.today().isoformat(),
        versions={x.what: x.found for x in versions()},
        samples=json.loads(json.dumps(facts, default=asdict)),
    )


# Starts the messages of a hop.
Start = Callable[[], Sequence[Work]]


class TimedMessages:
    """The messages of one rank within a group whose ranks all send at the same time.

    A call of a kind takes the bytes that a rank sends.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank, self.size = group.rank(), group.size()
        self._transport = ProcessGroupTransport(group)
        self._transport.prepare(device)

    def tensor(self, num_bytes: int) -> Tensor:
        """Return a flat tensor; its memory was written to, so that no page is new."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def shift(self, num_bytes: int) -> Start:
        """Return a call that starts a message to the next rank, and one from the previous."""
        sent, received = self.tensor(num_bytes), self.tensor(num_bytes)
        to, source = (self._rank + 1) % self.size, (self._rank - 1) % self.size
        return partial(self._transport.start, [P2P(received, source)], [P2P(sent, to)])

    def all_to_all(self, num_bytes: int) -> Start:
        """Return a call that starts one message to each other rank, as Ulysses does."""
        others = [rank for rank in range(self.size) if rank != self._rank]
        each = max(1, num_bytes // len(others))
        sends, receives = ([P2P(self.tensor(each), x) for x in others] for _ in range(2))
        return partial(self._transport.start, receives, sends)

    def all_gather(self, num_bytes: int) -> Call:
        """Return the collective in which each rank sends its shard to all others."""
        whole, shard = self._whole_and_shard(num_bytes)
        return partial(dist.all_gather_into_tensor, whole, shard, group=self._group)

    def reduce_scatter(self, num_bytes: int) -> Call:
        """Return the collective in which each rank gets the sum of its shard."""
        whole, shard = self._whole_and_shard(num_bytes)
        return partial(dist.reduce_scatter_tensor, shard, whole, group=self._group)

    def _whole_and_shard(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        numel = max(1, num_bytes // (self.size - 1) // 4)
        whole = torch.zeros(self.size * numel, device=self._device)
        return whole, torch.zeros(numel, device=self._device)


def link_points(messages: TimedMessages) -> dict[str, Points]:
    """Return messages and collectives by the bytes that a rank sends, for `Stopwatch.measure`."""

    def sized(make: Callable[[int], Call]) -> Points:
        for num_bytes in BYTES:
            yield float(num_bytes), make(num_bytes)

    return {
        "p2p": sized(lambda size: waited(messages.shift(size))),
        "all_to_all": sized(lambda size: waited(messages.all_to_all(size))),
        "all_gather": sized(messages.all_gather),
        "reduce_scatter": sized(messages.reduce_scatter),
    }


def waited(start: Start) -> Call:
    """Return a call that starts messages and waits for them."""
    return lambda: wait(start())


def wait(works: Sequence[Work]) -> None:
    """Wait for messages."""
    for work in works:
        work.wait()


# The largest slowdown of a transfer; a kernel that stops it makes the quotient infinite.
MOST = 100.0


class Beside(NamedTuple):
    """Times of kernels and of a transfer, in seconds.

    Attributes:
        kernels: of the kernels alone.
        transfer: of the transfer alone.
        together: until the kernels end that begin with the transfer.
        whole: until the transfer ends, too.

    >>> Beside(kernels=2.0, transfer=4.0, together=3.0, whole=5.5).slowdowns
    (2.0, 1.5)
    """

    kernels: float
    transfer: float
    together: float
    whole: float

    @property
    def slowdowns(self) -> tuple[float, float]:
        """How many times longer the transfer takes beside the kernels, and they beside it.

        The transfer outlasts the kernels, and has its usual speed after them. So while they run it
        does what it does alone in the rest of its time.
        """
        moved = self.transfer - (self.whole - self.together)
        transfer = self.together / max(moved, self.together / MOST)
        return max(1.0, transfer), max(1.0, self.together / self.kernels)


class MeasuredLinks(NamedTuple):
    """What was measured between the ranks of a host, or between hosts; fields as in `Machine`."""

    links: Links
    hop: float
    beside_kernel: float
    beside_transfer: float
    beside: list[Beside]


# The longest transfer that kernels run beside, in seconds, and rows of the tiles of these kernels,
# on a CPU and on a GPU.
BESIDE_SECONDS, BESIDE_ROWS = 0.1, (512, 4096)


def _measured_links(
    watch: Stopwatch,
    messages: TimedMessages,
    problem: CalibratedProblem,
    axis: str,
    times: Mapping[str, Series],
) -> MeasuredLinks:
    """Return the links of an axis; kernels run beside a transfer that takes twice as long."""
    hop = watch.host_seconds(messages.shift(1), wait)
    in_hop = 0.0 if watch.on_gpu else hop
    curves = {field.name: times[f"{field.name} {axis}"].curve(in_hop) for field in fields(Links)}
    links, kernel = Links(**curves), problem.kernels(watch.device)[0]
    # The largest message that is not too long; at least one of the first two is.
    size = max([x for x in BYTES if links.p2p(x) <= BESIDE_SECONDS], default=BYTES[1])
    tensors = problem.tensors(BESIDE_ROWS[watch.on_gpu], watch.device)
    tile = TileSeries(problem, kernel, "full").calls(tensors)
    start, works = messages.shift(size), list[Work]()
    count = max(1, round(links.p2p(size) / 2 / watch.seconds(tile.forward)))

    def kernels() -> None:
        for _ in range(count):
            tile.forward()

    def begin_both() -> None:
        works[:] = start()
        kernels()

    def turn() -> Beside:
        (alone,), (transfer,) = watch.laps(kernels), watch.laps(waited(start))
        together, whole = watch.laps(begin_both, lambda: wait(works))
        return Beside(alone, transfer, together, whole)

    # Each alone and both together, in turns.
    beside = [turn() for _ in range(2 * watch.effort.repeats)]
    slowdowns = [x.slowdowns for x in beside]
    of_transfers, of_kernels = median(x for x, _ in slowdowns), median(x for _, x in slowdowns)
    return MeasuredLinks(links, hop, of_transfers, of_kernels, beside)


def _all_links(
    measured: Mapping[str, MeasuredLinks], device: str, rate: float
) -> tuple[dict[str, Links], dict[str, str]]:
    """Return the links of both axes, and where those of each axis come from."""
    preset = next((x for x in PRESETS.values() if x.device == device), None)
    copies = Curve.line(0.0, rate / 2)  # a byte that is moved is read and written
    links, sources = {}, {}
    for axis in (INSIDE, BETWEEN):
        if axis in measured:
            links[axis], sources[axis] = measured[axis].links, "measured"
        elif preset is not None:
            links[axis], sources[axis] = getattr(preset, axis), f"preset {preset.name}"
        elif measured:
            (other,) = measured
            links[axis], sources[axis] = measured[other].links, f"those {other}"
        else:
            links[axis], sources[axis] = Links(copies, copies, copies, copies), "memory"
    return links, sources


def _memory(device: torch.device, ranks_per_host: int) -> int:
    """Return the bytes of a GPU, or this rank's part of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_per_host
