"""Tables of a machine, and of two machines side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dtensor_ring.command.table import print_table
from dtensor_ring.simulate.machine import Curve, Machine

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
        "launch": (machine.launch, "s"),
        "hop": (machine.hop, "s"),
        "transfer beside a kernel": (machine.beside_kernel, "times"),
        "kernel beside a transfer": (machine.beside_transfer, "times"),
    }


def show_machine(machine: Machine) -> None:
    """Print what a machine is, its numbers, and the ends of its curves with the last rate."""
    print_table(_facts(machine))
    print()
    print_table((name, in_units(*x)) for name, x in numbers_of(machine).items())
    print()
    rows = [(name, *_ends(curve, unit)) for name, unit, curve in curves_of(machine)]
    print_table(rows, ("", "smallest", "takes", "largest", "takes", "rate"))


def _facts(machine: Machine) -> list[tuple[str, str]]:
    facts = {
        "machine": machine.name,
        "device": machine.device,
        "source": f"{machine.source}, {machine.date}",
        "ranks per host": str(machine.ranks_per_host),
    }
    sources: Mapping[str, str] = machine.samples.get("links", {})
    facts |= {f"links {where}": source for where, source in sources.items()}
    return [*facts.items(), *machine.versions.items()]


def _ends(curve: Curve, unit: str) -> tuple[str, ...]:
    """Return the smallest and the largest size with their times, and the rate of the largest."""
    size, seconds = curve.sizes[-1], curve.seconds[-1]
    rate = in_units(size / seconds, f"{unit}/s") if seconds else "unlimited"
    first = in_units(curve.sizes[0], unit), in_units(curve.seconds[0], "s")
    return *first, in_units(size, unit), in_units(seconds, "s"), rate


def compare_machines(first: Machine, second: Machine) -> None:
    """Print two machines side by side, and the ratio of the second's numbers to the first's.

    Curves are compared at the smallest and the largest size of the first machine. What the
    second lacks has no row.

    Raises:
        ValueError: if the machines have different devices.
    """
    second.check_device(first.device)
    theirs = numbers_of(second)
    pairs = [(name, x, theirs[name]) for name, x in numbers_of(first).items() if name in theirs]
    others = {name: curve for name, _, curve in curves_of(second)}
    for name, unit, curve in curves_of(first):
        for size in (curve.sizes[0], curve.sizes[-1]) if name in others else ():
            at = f"{name}, {in_units(size, unit)}"
            pairs.append((at, (curve(size), "s"), (others[name](size), "s")))
    rows = [(name, in_units(*x), in_units(*y), _ratio(x[0], y[0])) for name, x, y in pairs]
    print_table(rows, ("", first.name, second.name, "second / first"))


def _ratio(first: float, second: float) -> str:
    return f"{second / first:.2f}" if first else ""
