"""The command `calibrate` measures a machine, and shows machine files as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtensor_ring.lab.calibrate.calibrate_kernels import CalibratedProblem
from dtensor_ring.lab.calibrate.calibrate_machine import BETWEEN, INSIDE, measure_machine
from dtensor_ring.lab.calibrate.stopwatch import FULL_EFFORT, QUICK_EFFORT, Effort, Stopwatch
from dtensor_ring.lab.machine import Curve, Machine
from dtensor_ring.lab.presets import as_machine, is_machine_file
from dtensor_ring.lab.ranks import connected, mesh_of_ranks
from dtensor_ring.lab.report import print_table, tracked, untracked


def calibrate(
    path: Path | None, show: bool, compare: tuple[str, str] | None, quick: bool, **asked: Any
) -> int:
    """Measure this machine into a file, or show a file, or compare two.

    Args:
        path: the file.
        show: whether to show it.
        compare: two machines to compare.
        quick: whether to measure a few sizes.
        asked: `kernel`, `heads`, `head_dim` and `dtype`, each `None` for what is usual.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: if something that was given cannot be used.
        OSError: if the file cannot be written.
    """
    if compare and show:
        raise ValueError("calibrate takes --show or --compare, not both")
    if compare:
        first, second = compare
        _compare_machines(as_machine(first), as_machine(second))
    elif path is None:
        raise ValueError("calibrate needs the file that it writes, or shows with --show")
    elif show:
        _show_machine(_of_kernel(as_machine(path), asked["kernel"]))
    else:
        _measure(path, QUICK_EFFORT if quick else FULL_EFFORT, **asked)
    return 0


def _of_kernel(machine: Machine, kernel: str | None) -> Machine:
    """Return a machine with the rows of one kernel; all of them for `None`."""
    rows = tuple(x for x in machine.kernels if kernel in (None, x.kernel))
    if not rows:
        known = ", ".join(sorted({x.kernel for x in machine.kernels}))
        raise ValueError(f"machine {machine.name} has no kernel {kernel!r}, only {known}")
    return replace(machine, kernels=rows)


# What is measured on a CPU and on a GPU unless options say otherwise: heads, and head dim.
HEADS = (8, 2), (32, 8)
HEAD_DIM = 64, 128


def _measure(
    path: Path,
    effort: Effort,
    kernel: str | None,
    heads: tuple[int, int] | None,
    head_dim: int | None,
    dtype: torch.dtype | None,
) -> None:
    """Measure on all ranks of the launcher, or on this one; rank 0 writes the file and shows it."""
    with connected(alone=not dist.is_torchelastic_launched()) as ranks:
        is_first = dist.get_rank() == 0
        if is_first:
            _check_writable(path)  # before the measurement
        watch = Stopwatch(ranks.device, effort, tracked if is_first else untracked)
        problem = CalibratedProblem(
            heads=heads or HEADS[watch.on_gpu],
            head_dim=head_dim or HEAD_DIM[watch.on_gpu],
            dtype=dtype or ranks.dtype,
            kernel=kernel,
        )
        # On a CPU all head dims have the rate of one.
        has_others = head_dim is None and watch.on_gpu
        others = problem.with_other_dims(watch.device) if has_others else []
        hosts = mesh_of_hosts(ranks.device.type)
        machine = measure_machine(path.stem, watch, hosts, problem, others)
        if is_first:
            path.write_text(machine.to_json())
            _show_machine(machine)


def _check_writable(path: Path) -> None:
    """Refuse a file that is there and is no machine's: it would be lost.

    Raises:
        ValueError: if it is, or if there is no folder for it.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written, as there is no folder {path.parent}")
    if path.exists() and not is_machine_file(path):
        raise ValueError(
            f"{path} is there, and is no file of a machine: give a new name, such as machine.json"
        )


def mesh_of_hosts(device_type: str) -> dist.DeviceMesh:
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
    return mesh_of_ranks(device_type, **{BETWEEN: size // per_host, INSIDE: per_host})


# Prefixes of units by their power of ten.
PREFIXES = (("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12))


def in_units(number: float, unit: str) -> str:
    """Return a number with three digits and a prefix of its unit; seconds get no large one.

    >>> in_units(9.999e8, "B/s"), in_units(0.00031, "s"), in_units(1200, "s")
    ('1 GB/s', '310 us', '1.2e+03 s')
    """
    rounded = float(f"{number:.2e}")
    known = [x for x in PREFIXES if unit != "s" or x[1] <= 0]
    fitting = [x for x in known if abs(rounded) >= 10 ** x[1]]
    prefix, power = fitting[-1] if fitting else known[0] if rounded else ("", 0)
    return f"{rounded / 10**power:.3g} {prefix}{unit}"


def curves_of(machine: Machine) -> Iterator[tuple[str, str, Curve]]:
    """Yield the name of each curve, the unit of its sizes, and the curve."""
    for speed in machine.kernels:
        heads = f"{speed.heads} x " if speed.heads else ""
        of_kernel = f"{speed.kernel} {speed.dtype} {heads}{speed.head_dim} {speed.form}"
        yield f"{of_kernel} forward", "FLOP", speed.forward
        yield f"{of_kernel} backward", "FLOP", speed.backward
    yield "merge", "B", machine.merge
    yield "pack", "B", machine.pack
    for where in ("inside", "between"):
        links = getattr(machine, where)
        for kind in ("p2p", "all_to_all", "all_gather", "reduce_scatter"):
            yield f"{kind} {where}", "B", getattr(links, kind)


def numbers_of(machine: Machine) -> dict[str, tuple[float, str]]:
    """Return the single numbers of a machine by name, each with its unit."""
    products = {f"matrix products {dtype}": (x, "FLOP/s") for dtype, x in machine.gemm.items()}
    return {
        **products,
        "memory": (float(machine.memory), "B"),
        "memory rate": (machine.memory_rate, "B/s"),
        **({"looked up": (machine.element_rate, "numbers/s")} if machine.element_rate else {}),
        "launch": (machine.launch, "s"),
        "hop": (machine.hop, "s"),
        "transfer beside a kernel": (machine.beside_kernel, "times"),
        "kernel beside a transfer": (machine.beside_transfer, "times"),
    }


# What stands in for links that were not measured, by what a machine file has as their source.
STAND_INS: Mapping[str, str] = {
    "memory": "not measured: half the rate of memory stands in",
    "those inside": "not measured: those inside hosts stand in",
}


def _show_machine(machine: Machine) -> None:
    """Print what a machine is, its numbers, and the ends of its curves with the last rate."""
    sources: Mapping[str, str] = machine.samples.get("links", {})
    facts = {
        "machine": machine.name,
        "device": machine.device,
        "source": f"{machine.source}, {machine.date}",
        "ranks per host": str(machine.ranks_per_host),
    }
    facts |= {f"links {x}": STAND_INS.get(source, source) for x, source in sources.items()}
    print_table([*facts.items(), *machine.versions.items()])
    print()
    numbers = numbers_of(machine).items()
    print_table((name, in_units(number, unit)) for name, (number, unit) in numbers)
    print()
    not_measured = tuple(f" {where}" for where, source in sources.items() if source in STAND_INS)
    rows = [
        (name, *_ends(curve, unit))
        for name, unit, curve in curves_of(machine)
        if not name.endswith(not_measured)
    ]
    print_table(rows, ("", "smallest", "takes", "largest", "takes", "rate"))


def _ends(curve: Curve, unit: str) -> tuple[str, ...]:
    """Return the smallest and the largest size with their times, and the rate of the largest."""
    size, seconds = curve.sizes[-1], curve.seconds[-1]
    rate = in_units(size / seconds, f"{unit}/s") if seconds else "unlimited"
    first = in_units(curve.sizes[0], unit), in_units(curve.seconds[0], "s")
    return *first, in_units(size, unit), in_units(seconds, "s"), rate


def _compare_machines(first: Machine, second: Machine) -> None:
    """Print two machines side by side, and the ratio of the second's numbers to the first's.

    Curves are compared at the smallest and the largest size of the first machine. What the
    second lacks has no row.
    """
    second.check_device(first.device)
    theirs = numbers_of(second)
    pairs = [
        (name, number, theirs[name][0], unit)
        for name, (number, unit) in numbers_of(first).items()
        if name in theirs
    ]
    others = {name: curve for name, _, curve in curves_of(second)}
    for name, unit, curve in curves_of(first):
        for size in (curve.sizes[0], curve.sizes[-1]) if name in others else ():
            at = f"{name}, {in_units(size, unit)}"
            pairs.append((at, curve(size), others[name](size), "s"))
    rows = [
        (name, in_units(x, unit), in_units(y, unit), f"{y / x:.2f}" if x else "")
        for name, x, y, unit in pairs
    ]
    print_table(rows, ("", first.name, second.name, "second / first"))
