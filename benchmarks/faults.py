"""How long it takes until ranks know that one of them died, stopped or raised.

    python benchmarks/faults.py

Plays the faults of ``tests/faults/test_faults.py`` over and over, and takes the time from the fault
to the last of the other ranks that raises. With ``--quick`` it plays each once and writes to
``out``.
"""

from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

from harness import is_quick, origin, publish, table_of
from rich.console import Console

from tests.faults.test_faults import FAULTS, VICTIM, suffer
from tests.faults.worlds import Worlds

REPEATS = 15
MEASURED = (
    "killed, forward",
    "killed, large messages, backward",
    "kernel, caught",
    "kernel, uncaught, backward",
    "exit, uncaught",
    "killed, decoding",
    "kernel, caught, decoding",
    "append, uncaught",
    "stopped, forward",
    "append, caught",
)


@dataclass(frozen=True)
class News:
    """Seconds from a fault until the last rank raises, by time it was played."""

    name: str
    limit: float
    seconds: list[float]


def measure(worlds: Worlds, name: str, repeats: int) -> News:
    fault = FAULTS[name]
    seconds = []
    for _ in range(repeats):
        fates = worlds.run(fault.world_size, suffer, fault, terms=fault.terms)
        told = [fate.events["told"] for rank, fate in enumerate(fates) if rank != VICTIM]
        seconds.append(max(told) - fates[VICTIM].events["fault"])
    return News(name, fault.terms.timeout, seconds)


def report(console: Console, news: list[News]) -> None:
    """Print what was measured, in Markdown."""
    console.print("\nSeconds from the fault of rank 1 until the last of the others raises.\n")
    table = table_of(("fault",), ("limit of the group", "median", "longest"))
    for of_fault in news:
        times = median(of_fault.seconds), max(of_fault.seconds)
        table.add_row(of_fault.name, f"{of_fault.limit:.0f}", *(f"{x:.2f}" for x in times))
    console.print(table)


def main() -> None:
    quick = is_quick(__doc__)
    about, worlds = origin(), Worlds()
    try:
        news = [measure(worlds, name, 1 if quick else REPEATS) for name in MEASURED]
    finally:
        worlds.close()
    measured = {"news": [asdict(of_fault) for of_fault in news]}
    publish("faults", "News of faults", quick, about, measured, partial(report, news=news))


if __name__ == "__main__":
    main()
