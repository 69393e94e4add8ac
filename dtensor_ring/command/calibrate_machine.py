"""Measures a machine: what its ranks compute, what moves between them, and what it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from datetime import date
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.command.calibrate_kernels import (
    CalibratedProblem,
    kernel_points,
    kernel_speeds,
    launch_seconds,
    measure_matrices,
    measure_memory,
    merge_points,
    pack_points,
)
from dtensor_ring.command.calibrate_links import (
    Beside,
    TimedMessages,
    hop_seconds,
    link_points,
    measure_beside,
)
from dtensor_ring.command.doctor import versions
from dtensor_ring.command.stopwatch import Points, Series, Stopwatch
from dtensor_ring.simulate.machine import Curve, Links, Machine
from dtensor_ring.simulate.presets import PRESETS

# The axes of the mesh: hosts, and the ranks of each host.
BETWEEN, INSIDE = "between", "inside"


class MeasuredLinks(NamedTuple):
    """What was measured between the ranks of a host, or between hosts.

    Attributes:
        links: seconds by bytes.
        hop: seconds of the host for a hop.
        beside_kernel: how many times longer a transfer takes while a kernel runs.
        beside_transfer: how many times longer a kernel takes while a transfer runs.
        beside: times of kernels and transfers beside each other.
    """

    links: Links
    hop: float
    beside_kernel: float
    beside_transfer: float
    beside: list[Beside]


def measure_machine(
    name: str, watch: Stopwatch, mesh: DeviceMesh, problem: CalibratedProblem
) -> Machine:
    """Measure kernels and links of a machine; all ranks of the default process group call this.

    Links that no ranks have are those of the preset of this device. Without one, hosts are
    connected as the ranks of one host are, and a rank alone as its own memory is.

    Args:
        name: of the machine.
        watch: times the calls of all ranks.
        mesh: the axes `BETWEEN` and `INSIDE`, in this order.
        problem: the attention that is measured.

    Returns:
        The machine, with the same times on all ranks.

    Raises:
        ValueError: if no kernel serves the problem.
    """
    launch, rate = launch_seconds(watch, problem), measure_memory(watch)
    axes = {
        axis: TimedMessages(mesh.get_group(axis), watch.device)
        for axis in (BETWEEN, INSIDE)
        if mesh[axis].size() > 1
    }
    times = _measured(watch, problem, axes)
    host_waits = not watch.on_gpu
    # Only where the host waits are its seconds part of what was measured.
    in_launch = launch if host_waits else 0.0
    measured = {
        axis: _measured_links(watch, messages, problem, axis, times)
        for axis, messages in axes.items()
    }
    device = device_name(watch.device)
    links, sources = _all_links(measured, device, rate)
    facts: dict[str, Any] = {"heads": problem.heads, "hosts": mesh[BETWEEN].size()}
    facts |= {"links": sources, "beside": {axis: x.beside for axis, x in measured.items()}}
    # An axis over several hosts waits for the messages between them.
    slowest = next(iter(measured.values()), None)
    return Machine(
        name=name,
        device=device,
        source="measured",
        ranks_per_host=mesh[INSIDE].size(),
        memory=_memory(watch.device, mesh[INSIDE].size()),
        kernels=kernel_speeds(problem, watch.device, times, in_launch),
        gemm=measure_matrices(watch, [problem.dtype, torch.float32]),
        memory_rate=rate,
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
        samples=_as_json({**facts, "threads": torch.get_num_threads(), **times}),
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device, as `Machine.device` has it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _measured(
    watch: Stopwatch, problem: CalibratedProblem, axes: Mapping[str, TimedMessages]
) -> dict[str, Series]:
    """Time everything that has a size."""
    points = kernel_points(problem, watch.device)
    points["merge"] = merge_points(problem, watch.device)
    points["pack"] = pack_points(problem, watch.device)
    links: dict[str, Points] = {}
    for axis, messages in axes.items():
        links |= {f"{kind} {axis}": of for kind, of in link_points(messages).items()}
    return watch.measure(points | links, cold=links)


def _measured_links(
    watch: Stopwatch,
    messages: TimedMessages,
    problem: CalibratedProblem,
    axis: str,
    times: Mapping[str, Series],
) -> MeasuredLinks:
    hop = hop_seconds(watch, messages)
    in_hop = 0.0 if watch.on_gpu else hop
    curves = {field.name: times[f"{field.name} {axis}"].curve(in_hop) for field in fields(Links)}
    links, (kernel, *_) = Links(**curves), problem.kernels(watch.device)
    return MeasuredLinks(links, hop, *measure_beside(watch, messages, links.p2p, problem, kernel))


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


def _as_json(x: Any) -> Any:
    """Return what JSON makes of dataclasses, tuples and dicts."""
    if is_dataclass(x) and not isinstance(x, type):
        return _as_json(asdict(x))
    if isinstance(x, Mapping):
        return {key: _as_json(value) for key, value in x.items()}
    return [_as_json(value) for value in x] if isinstance(x, (tuple, list)) else x
