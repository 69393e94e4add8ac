"""What a ring can reach on a GPU: its bytes and launches as counted, at published speeds.

`python -m tests.roofline --write` puts the tables into `docs/speed.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np

from docs.marked import parts, table_row
from dtensor_ring import Mask, ZigZag
from dtensor_ring.planning.plan import Plan
from tests.rings import Ring
from tests.traffic import HEAD_DIM, HEADS, KV_HEADS, of_rank

PAGE = Path(__file__).parent.parent / "docs" / "speed.md"
RANKS, SHARD = 8, 8192
RING = Ring(ZigZag(), RANKS, RANKS * SHARD, Mask.causal())
NUM_PARTS = (2, None, 8)
BEFORE = (2.09, 11.0), (3.22, 32.0)
"""GB and launches forward and backward when every step was merged at once."""

STREAM = 0.88
"""Of the published speed of a memory that one pass over it reaches: an assumption."""
HOPPER, BLACKWELL = 0.97 / 0.993, 0.988 / 0.993
"""How much blocks of tiles fill their waves on 132 and 148 multiprocessors, next to one launch."""


@dataclass(frozen=True)
class Gpu:
    """A GPU and a kernel at their published speeds.

    Attributes:
        name: of both.
        memory: bytes per second.
        flops: per second, forward and backward, where they are published.
        waves: part of the speed that tiles keep, whose last wave of blocks is not full.
        split: seconds that a backward of tiles takes longer than one launch, within the kernel.
    """

    name: str
    memory: float
    flops: tuple[float, ...]
    waves: float = HOPPER
    split: float = 0.0


GPUS = (
    Gpu("H100, flash attention 3", 3.35e12, (650e12, 550e12), split=0.8e-3),
    Gpu("H200, flash attention 3", 4.8e12, (650e12, 550e12), split=0.8e-3 * 3.35 / 4.8),
    Gpu("H100, flash attention 2", 3.35e12, (370e12, 330e12), split=1.3e-3),
    Gpu("H200, flash attention 2", 4.8e12, (370e12, 330e12), split=1.3e-3 * 3.35 / 4.8),
    Gpu("B200, flash attention 4", 8e12, (1605e12,), BLACKWELL),
)

LINK = 350e9
"""Bytes per second between two GPUs: NVLink of an H100 in one direction, as messages reach it."""

MULTIPROCESSORS = 132
"""Of an H100 and an H200."""


@dataclass(frozen=True)
class Carrier:
    """A way in which messages travel.

    Attributes:
        name: of it.
        route: the route of its messages.
        margin: multiprocessors that attention leaves to messages in flight, forward.
        is_hidden: whether messages travel beside kernels.
    """

    name: str
    route: str = "around"
    margin: int = 0
    is_hidden: bool = True


CARRIERS = (
    Carrier("NCCL, after the tile", is_hidden=False),
    Carrier("NCCL, beside the tile in a margin of 8", margin=8),
    Carrier("NCCL, beside the tile"),
    Carrier('the same, `strategy="direct"`', "direct"),
    Carrier('the same, `strategy="all_gather"`', "all_gather"),
    Carrier("copy engines, beside the tile"),
)

HOST = (0.43e-3, 0.94e-3)
"""Seconds of Python of 8 steps, forward and backward, around kernels that do nothing."""
HOP = 0.1e-3
"""Seconds of the host to start and to wait for the messages of a hop."""


@cache
def counted(num_parts: int | None) -> tuple[tuple[float, float], ...]:
    """Bytes and launches beside the kernels, mean of all ranks: forward and backward."""
    by_rank = [of_rank(RING, rank, num_parts=num_parts) for rank in range(RANKS)]
    return tuple(
        (mean(x.bytes.total() for x in stage), mean(x.launches.total() for x in stage))
        for stage in zip(*by_rank, strict=True)
    )


@cache
def flops() -> tuple[float, float]:
    """Of a rank, forward and backward, counted from the tiles of all plans."""
    steps = [step for plan in RING.plans() for step in plan.steps]
    pairs = sum(tile.area for step in steps for tile in step.tiles) / RANKS
    # Two products forward; five backward, where scores are computed again.
    return 4 * HEADS * HEAD_DIM * pairs, 10 * HEADS * HEAD_DIM * pairs


@cache
def continued() -> tuple[float, float]:
    """Bytes that kernels would move if they went on from (out, lse), forward and backward.

    Those of their own output in 16 bits do not count. A running output is float32 until its last
    launch: 2 bytes a number more are written, and 4 are read by all launches but the first. The
    gradient of a query stays where a kernel adds it up. Sums that travel are read and written.
    """
    again = columns = 0
    for plan in RING.plans():
        visits = np.zeros(plan.num_local[0], int)
        for step in plan.steps:
            for tile in step.tiles:
                visits[slice(*tile.rows)] += 1
        again += (visits - 1).clip(min=0).sum()
        columns += sum(len(step.cols) for step in plan.steps[1:])
    per_row, per_column = HEADS * (6 * HEAD_DIM + 4), 2 * KV_HEADS * HEAD_DIM * 6
    # The sum that arrives last meets no launch: it is added to this rank's own gradients.
    arrived = 2 * KV_HEADS * HEAD_DIM * SHARD * (4 + 2 + 2)
    return again * per_row / RANKS, columns * per_column / RANKS + arrived


def bound(gpu: Gpu, num_parts: int | None, num_stages: int, with_waves: bool = True) -> float:
    """Speed next to one launch, of the forward or with the backward; waves may be left out."""
    num_bytes = [moved for moved, _ in counted(num_parts)]
    return speed_beside(gpu, num_bytes[:num_stages], gpu.waves if with_waves else 1)


def speed_beside(gpu: Gpu, num_bytes: Sequence[float], waves: float) -> float:
    """Speed next to one launch, of the forward or of both, with these bytes of each beside it."""
    alone = sum(work / speed for work, speed, _ in zip(flops(), gpu.flops, num_bytes, strict=False))
    split = gpu.split if len(num_bytes) == 2 else 0
    return alone / (alone / waves + sum(num_bytes) / (STREAM * gpu.memory) + split)


def columns_received(plans: Sequence[Plan], number: int) -> tuple[float, float]:
    """Columns of shards and of sums that a hop brings, means of the ranks."""
    shards, sums = (
        mean(sum(len(x.cols) for x in hops[number].receives) for hops in of_stage)
        for of_stage in ([plan.shards for plan in plans], [plan.sums for plan in plans])
    )
    return shards, sums


@cache
def received(route: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes that a rank receives while it computes a step, forward and backward, and after it."""
    plans = replace(RING, strategy=route).plans()
    per_token = 2 * KV_HEADS * HEAD_DIM
    hops = [columns_received(plans, number) for number in range(RANKS)]
    # Keys and values travel in 16 bits. Sums travel in 32, beside the step after theirs.
    forward = [2 * per_token * shards for shards, _ in [*hops, (0, 0)]]
    summed = [4 * per_token * sums for _, sums in [(0, 0), *hops]]
    return tuple(forward), tuple(x + y for x, y in zip(forward, summed, strict=True))


def carried(carrier: Carrier, gpu: Gpu, num_parts: int, num_stages: int) -> float:
    """Speed next to one launch, with the messages."""
    works = zip(flops()[:num_stages], gpu.flops, strict=False)
    alone = sum(work / speed for work, speed in works)
    slower = MULTIPROCESSORS / (MULTIPROCESSORS - carrier.margin) - 1
    # Messages are in flight in all steps but the last; backwards leave no margin.
    margin = flops()[0] / gpu.flops[0] / gpu.waves * slower * (RANKS - 1) / RANKS
    found = received(carrier.route)[:num_stages]
    exposed = sum(x[-1] if carrier.is_hidden else sum(x) for x in found) / LINK
    return alone / (alone / bound(gpu, num_parts, num_stages) + margin + exposed)


def host_bound(gpu: Gpu, stage: int) -> int:
    """Tokens of a rank below which the host takes longer than the kernels."""
    # Forward a hop moves shards; backward there is one of sums as well.
    host = HOST[stage] + (1 + stage) * (RANKS - 1) * HOP
    kernels = flops()[stage] / gpu.flops[stage]
    return round(SHARD * (host / kernels) ** 0.5)


def replaced(text: str, name: str, table: str) -> str:
    """The page with that table between its markers."""
    begin, end = f"<!-- {name}: written by tests/roofline.py -->\n", f"\n<!-- end of {name} -->"
    before, _, after = parts(text, begin, end)
    return before + table + after


def tables() -> dict[str, str]:
    """Tables of the page, by name."""
    return {
        "steps": "\n".join(_steps()),
        "bytes": "\n".join(_bytes()),
        "bounds": "\n".join(_bounds()),
        "transports": "\n".join(_transports()),
        "continued": "\n".join(_continued()),
        "host": "\n".join(_host()),
    }


def _head(*titles: str) -> Iterator[str]:
    yield table_row(*titles)
    yield table_row(*("---" for _ in titles))


def _steps() -> Iterator[str]:
    """Work and messages of each step, means of the ranks; steps that are alike are one row."""
    yield from _head(
        *("step", "TFLOP forward", "ms", "MB received", "ms at 350 GB/s"),
        *("TFLOP backward", "ms", "MB received", "ms at 350 GB/s"),
    )
    rows: dict[tuple[str, ...], list[int]] = {}
    for number in range(RANKS):
        rows.setdefault(tuple(_step(number)), []).append(number)
    for cells, numbers in rows.items():
        name = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else numbers[0]
        yield table_row(name, *cells)


def _step(number: int) -> Iterator[str]:
    plans = RING.plans()
    pairs = mean(sum(tile.area for tile in plan.steps[number].tiles) for plan in plans)
    shards, sums = columns_received(plans, number)
    per_token = 2 * KV_HEADS * HEAD_DIM
    # Keys and values travel in 16 bits, sums of gradients in 32.
    moved = 2 * per_token * shards, per_token * (2 * shards + 4 * sums)
    for factor, speed, num_bytes in zip((4, 10), GPUS[0].flops, moved, strict=True):
        work = factor * HEADS * HEAD_DIM * pairs
        yield f"{work / 1e12:.2f}"
        yield f"{1e3 * work / speed:.2f}"
        yield f"{num_bytes / 1e6:.0f}"
        yield f"{1e3 * num_bytes / LINK:.2f}"


def _bytes() -> Iterator[str]:
    yield from _head(
        *("`num_parts`", "GB forward", "GB backward", "launches forward", "launches backward")
    )
    yield table_row("step by step, as before", *(x[i] for i in range(2) for x in BEFORE))
    for num_parts in NUM_PARTS:
        found = counted(num_parts)
        name = "`None`, which is 4 here" if num_parts is None else num_parts
        gigabytes = (f"{num_bytes / 1e9:.2f}" for num_bytes, _ in found)
        yield table_row(name, *gigabytes, *(f"{launches:g}" for _, launches in found))


def _bounds() -> Iterator[str]:
    titles = [f"`num_parts={x}`" for x in NUM_PARTS]
    yield from _head(
        *(
            "",
            "ms alone",
            *(f"{x} forward" for x in titles),
            *(f"{x} with backward" for x in titles),
        )
    )
    for gpu in GPUS:
        times = [work / speed for work, speed in zip(flops(), gpu.flops, strict=False)]
        shown = " + ".join(f"{1e3 * seconds:.1f}" for seconds in times)
        cells = [
            f"{bound(gpu, num_parts, stages):.1%}" if stages <= len(times) else ""
            for stages in (1, 2)
            for num_parts in NUM_PARTS
        ]
        yield table_row(gpu.name, shown, *cells)


def _transports() -> Iterator[str]:
    yield from _head(
        *("how messages travel", "MB received", "GB/s that hide them", "forward", "with backward")
    )
    gpu = GPUS[0]
    for carrier in CARRIERS:
        found = received(carrier.route)
        times = [work / speed / RANKS for work, speed in zip(flops(), gpu.flops, strict=True)]
        needed = [max(x[:-1]) / seconds for x, seconds in zip(found, times, strict=True)]
        yield table_row(
            carrier.name,
            " + ".join(f"{sum(x) / 1e6:.0f}" for x in found),
            ", ".join(f"{x / 1e9:.0f}" for x in needed) if carrier.is_hidden else "",
            *(f"{carried(carrier, gpu, RANKS, stages):.1%}" for stages in (1, 2)),
        )


def _continued() -> Iterator[str]:
    forward, backward = (num_bytes / 1e9 for num_bytes in continued())
    yield from _head("", f"{forward:.2f} GB forward", f"and {backward:.2f} GB backward")
    for gpu in GPUS:
        stages = range(1, len(gpu.flops) + 1)
        cells = [f"{speed_beside(gpu, continued()[:number], gpu.waves):.1%}" for number in stages]
        yield table_row(gpu.name, *[*cells, ""][:2])


def _host() -> Iterator[str]:
    yield from _head("", "forward", "backward")
    for gpu in GPUS:
        found = [f"{host_bound(gpu, stage):,}" for stage in range(len(gpu.flops))]
        yield table_row(gpu.name, *[*found, ""][:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the tables in the page")
    write, text = parser.parse_args().write, PAGE.read_text()
    for name, table in tables().items():
        text = replaced(text, name, table)
        print(table)
    if write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
