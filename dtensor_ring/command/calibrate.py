"""The command `calibrate` measures a machine, and shows and compares machine files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring.command.calibrate_kernels import CalibratedProblem
from dtensor_ring.command.calibrate_machine import BETWEEN, INSIDE, measure_machine
from dtensor_ring.command.doctor import connected
from dtensor_ring.command.machine_tables import compare_machines, show_machine
from dtensor_ring.command.stopwatch import FULL_EFFORT, QUICK_EFFORT, Effort, Stopwatch
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.transport.transport import axis_group_options

# What is measured on a CPU and on a GPU unless options say otherwise: heads, and head dim.
HEADS = (8, 2), (32, 8)
HEAD_DIM = 64, 128


def calibrate(
    path: Path | None,
    show: bool,
    compare: tuple[str, str] | None,
    kernel: str | None,
    heads: tuple[int, int] | None,
    head_dim: int | None,
    dtype: torch.dtype | None,
    quick: bool,
) -> int:
    """Measure this machine into a file, or show a file, or compare two.

    Returns:
        The exit status: 2 if something that was given cannot be used, which is said in one line.
    """
    try:
        if compare:
            compare_machines(*(as_machine(x) for x in compare))
        elif path is None:
            raise ValueError("calibrate needs the file that it writes, or shows with --show")
        elif show:
            show_machine(_of_kernel(as_machine(path), kernel))
        else:
            _measure(path, kernel, heads, head_dim, dtype, QUICK_EFFORT if quick else FULL_EFFORT)
    except (OSError, ValueError) as error:
        if dist.get_node_local_rank(0) == 0:
            print(error, file=sys.stderr)
        return 2
    return 0


def _of_kernel(machine: Machine, kernel: str | None) -> Machine:
    """Return a machine with the rows of one kernel; all of them for `None`.

    Raises:
        ValueError: if it has none of this kernel.
    """
    rows = tuple(x for x in machine.kernels if kernel in (None, x.kernel))
    if not rows:
        known = ", ".join(sorted({x.kernel for x in machine.kernels}))
        raise ValueError(f"machine {machine.name} has no kernel {kernel!r}, only {known}")
    return replace(machine, kernels=rows)


def _measure(
    path: Path,
    kernel: str | None,
    heads: tuple[int, int] | None,
    head_dim: int | None,
    dtype: torch.dtype | None,
    effort: Effort,
) -> None:
    """Measure on all ranks of the launcher, or on this one; rank 0 writes the file and shows it.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if there is no folder for it, no kernel serves what is asked for, or hosts have
            different numbers of ranks.
    """
    with connected(alone=not dist.is_torchelastic_launched()) as ranks:
        if dist.get_rank() == 0 and not path.parent.is_dir():  # say so before the measurement
            raise ValueError(f"{path} cannot be written, as there is no folder {path.parent}")
        kind = ranks.device.type
        watch = Stopwatch(ranks.device, effort)
        usual = HEADS[watch.on_gpu], HEAD_DIM[watch.on_gpu]
        sizes = heads or usual[0], head_dim or usual[1], dtype or ranks.dtype
        problem = CalibratedProblem(*sizes, kernel)
        machine = measure_machine(path.stem, watch, mesh_of_hosts(kind), problem)
        if dist.get_rank() == 0:
            path.write_text(machine.to_json())
            show_machine(machine)


def mesh_of_hosts(device_type: str) -> DeviceMesh:
    """Return the mesh of hosts, and of the ranks of each, by what launchers say of local ranks.

    Raises:
        ValueError: if hosts have different numbers of ranks.
    """
    size = dist.get_world_size()
    local_ranks = [0] * size
    dist.all_gather_object(local_ranks, dist.get_node_local_rank(0))
    per_host = max(local_ranks) + 1
    if size % per_host or local_ranks != [rank % per_host for rank in range(size)]:
        raise ValueError(
            "all hosts need the same number of ranks, in the order of hosts, got the local ranks "
            f"{', '.join(map(str, local_ranks))}"
        )
    options = axis_group_options(device_type)
    axes = (BETWEEN, INSIDE)
    overrides: Any = None if options is None else dict.fromkeys(axes, options)
    shape = size // per_host, per_host
    return init_device_mesh(device_type, shape, mesh_dim_names=axes, backend_override=overrides)
