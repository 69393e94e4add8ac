"""Measure what it takes to bring the keys that queries selected, next to bringing all of them.

Run ``python benchmarks/selected.py``: it starts 2 and 4 processes itself, prints a table, and
writes it with every single time to ``benchmarks/results``. With ``--quick`` it repeats less, with
fewer tokens, and writes to ``out`` instead. Keys are latents of 576 numbers. The queries of a rank
select among the same part of all keys, from 1/2 to 1/64. Both ways are timed in turns, and ratios
are medians of the ratios of neighbouring times. Leave the machine alone meanwhile.
"""

from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from baselines import Stages, median_ratio, time_paired
from harness import is_quick, origin, publish, spawn, table_of
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import ZigZag
from dtensor_ring.selected.moved_keys import Moved, SelectedKeys
from dtensor_ring.selected.plan import ALL, SELECTED, key_positions, request_bytes
from dtensor_ring.transport.transport import ProcessGroupTransport

SEQ_LEN, WIDTH = 16384, 576
PARTS = 2, 4, 8, 16, 32, 64
WAYS = "keys", "keys and gradients"


@dataclass(frozen=True)
class Case:
    """One of `part` keys is selected by a query of each rank."""

    world_size: int
    seq_len: int
    part: int
    repeats: int


@dataclass(frozen=True)
class Measurement:
    """Seconds by contender, stage and repeat; bytes that rank 0 receives, by contender."""

    case: Case
    received: dict[str, int]
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)


def cases(quick: bool) -> list[Case]:
    """By ranks and part."""
    seq_len, repeats = (SEQ_LEN // 16, 3) if quick else (SEQ_LEN, 25)
    sizes, parts = ((2,), (2, 64)) if quick else ((2, 4), PARTS)
    return [Case(size, seq_len, part, repeats) for size in sizes for part in parts]


def lists(case: Case, rank: int) -> Tensor:
    """Positions by local query: together they are a random part of all."""
    torch.manual_seed(rank)
    chosen = torch.randperm(case.seq_len)[: case.seq_len // case.part].int()
    num_queries = case.seq_len // case.world_size
    width = -(-len(chosen) // num_queries)
    return chosen.repeat(-(-num_queries * width // len(chosen)))[: num_queries * width].view(
        1, 1, num_queries, width
    )


def stages(keys: SelectedKeys, selected: Tensor, route: str, kept: dict[str, Moved]) -> Stages:
    """The keys of other ranks come, and their gradients go home."""

    def come() -> list[Tensor]:
        kept[route] = keys.moved(selected, route)
        return [kept[route].residents.rows]

    def go() -> list[Tensor]:
        rows = kept[route].residents.rows
        return [keys.summed(kept[route], rows.clone(), rows.dtype)]

    return come, go


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    group = mesh.get_group()
    rank, size = group.rank(), case.world_size
    positions = key_positions(ZigZag(), size, case.seq_len)
    rows = torch.randn(1, 1, case.seq_len // size, WIDTH)
    shape = WIDTH, (0, WIDTH - 64)
    keys = SelectedKeys(rows, shape, positions, rank, ProcessGroupTransport(group), "forward")
    selected, kept = lists(case, rank), {}
    contenders = {route: stages(keys, selected, route, kept) for route in (SELECTED, ALL)}
    received = {}
    for route, (come, _) in contenders.items():
        come()
        keys_here = len(kept[route].residents.rows) - rows.shape[2]
        asked = (size - 1) * request_bytes(rows.shape[2]) if route == SELECTED else 0
        received[route] = asked + keys_here * WIDTH * rows.itemsize
    seconds = time_paired(contenders, case.repeats, lambda: dist.barrier(group))
    return Measurement(case, received, seconds)


def table(measurements: list[Measurement]) -> Table:
    """Two rows for each case."""
    numbers = ("MiB of selected", "of all", "selected, ms", "all, ms", "selected/all")
    result = table_of(("ranks", "part", "what"), numbers)
    for m in measurements:
        for stage, what in enumerate(WAYS):
            ours, others = m.seconds[SELECTED][stage], m.seconds[ALL][stage]
            sizes = [f"{m.received[route] / 2**20:.2f}" for route in (SELECTED, ALL)]
            times = [f"{1e3 * median(x):.2f}" for x in (ours, others)]
            ratio = f"{median_ratio(ours, others):.3f}"
            names = str(m.case.world_size), f"1/{m.case.part}", what
            result.add_row(*names, *sizes, *times, ratio)
    return result


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        f"\n{measurements[0].case.seq_len:,} tokens, batch 1, latents of {WIDTH} numbers, float32, "
        "gloo, zigzag, one thread a\nrank. Selected: requests of a bit for each key, then the keys "
        "that were asked for; all: every key.\nMiB are what rank 0 receives of keys. The time of "
        "the slowest rank.\n"
    )
    console.print(table(measurements))


def main() -> None:
    quick = is_quick(__doc__)
    about = origin()
    found = [x for case in cases(quick) for x in spawn(case.world_size, measure, [case])]
    measurements = [Measurement(Case(**x["case"]), x["received"], x["seconds"]) for x in found]
    measured: dict[str, Any] = {"measurements": [asdict(m) for m in measurements]}
    show = partial(report, measurements=measurements)
    publish("selected", "Selected keys, or all of them", quick, about, measured, show)


if __name__ == "__main__":
    main()
