"""How the balanced layout shards packed documents: balance, makespan, what travels, milliseconds.

    python benchmarks/balancing.py

One process, no tensors. What is needed is counted position by position from the definition of the
mask, not by the planner. With ``--quick`` it takes seconds and writes to ``out``.
"""

from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import process_time

import numpy as np
from harness import is_quick, origin, publish, table_of
from rich.console import Console

from dtensor_ring import Balanced, Mask, describe_schedule
from dtensor_ring.balanced import balanced
from dtensor_ring.lab.schedule import Schedule
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.slices import slices_of

CAUSAL = Mask.causal()

BEFORE = {
    (2**17, 8): (
        (689_976, 108_892, 1.005, 1.804, 1.804, 14.5),
        (890_610, 177_650, 1.005, 1.592, 1.592, 13.9),
        (803_313, 203_835, 1.006, 1.658, 1.658, 14.4),
        (859_138, 576_697, 1.009, 1.133, 1.133, 12.3),
    ),
    (2**17, 32): (
        (625_871, 519_380, 1.009, 2.567, 2.335, 12.7),
        (715_891, 559_925, 1.009, 2.817, 2.238, 13),
        (3_749_721, 809_905, 1.007, 2.205, 2.205, 12.2),
        (3_989_074, 2_641_885, 1.01, 1.139, 1.139, 12.8),
    ),
    (2**20, 8): (
        (7_056_658, 964_904, 1.005, 1.64, 1.64, 256),
        (7_206_605, 743_782, 1.008, 1.623, 1.623, 214.6),
        (5_567_044, 744_025, 1.01, 1.446, 1.446, 194.3),
        (6_754_230, 771_559, 1.007, 1.705, 1.705, 188.9),
    ),
    (2**20, 32): (
        (28_961_781, 3_642_270, 1.008, 2.395, 2.395, 145.7),
        (31_296_577, 3_135_566, 1.008, 2.411, 2.411, 133.9),
        (28_754_573, 4_377_484, 1.01, 2.318, 2.318, 172.1),
        (31_802_032, 4_129_922, 1.01, 2.35, 2.35, 141.3),
    ),
}
"""The layout that swapped blocks, commit 15b09e2: by tokens and ranks, then by seed.

Tokens moved and needed, imbalance, makespan, that if neighbours always wait, milliseconds.
"""


@dataclass(frozen=True)
class ShardedBatch:
    """One batch of documents, sharded."""

    seq_len: int
    world_size: int
    seed: int
    num_documents: int
    moved: int
    """Tokens that the plans let travel, all ranks together."""
    needed: int
    """Tokens that ranks see and do not hold."""
    imbalance: float
    makespan: float
    """A rank waits for those that it exchanges messages with."""
    lockstep: float
    """The same, if a rank waits for both neighbours at every step, with a message or without."""
    milliseconds: float
    """Of the processor to shard, the median."""
    num_runs: int
    num_tiles: int


def documents(seed: int, seq_len: int) -> np.ndarray:
    """Boundaries of documents of lognormal lengths: median 700, mean 2,156 tokens."""
    generator, ends = np.random.default_rng(seed), [0]
    while ends[-1] < seq_len:
        length = max(1, int(700 * np.exp(1.5 * generator.standard_normal())))
        ends.append(min(seq_len, ends[-1] + length))
    return np.array(ends, dtype=np.int32)


def needed(layout: Balanced) -> int:
    """Positions that ranks see and do not hold, from the definition of causal documents."""
    ends, total = layout.documents.arrays[0], 0
    for rank in range(layout.world_size):
        held, seen = np.zeros((2, layout.seq_len), dtype=bool)
        for run in layout.runs(rank, layout.world_size, layout.seq_len):
            held[run.start : run.start + run.length] = True
            # All documents of a run but the first begin in it.
            begin = ends[np.searchsorted(ends, run.start, "right") - 1]
            seen[begin : run.start + run.length] = True
        total += int((seen & ~held).sum())
    return total


def lockstep(schedule: Schedule) -> float:
    """The makespan if a rank waits for both neighbours at every step."""
    areas = np.array(schedule.areas)
    begun = np.zeros(len(areas), dtype=np.int64)
    for work in areas.T:
        begun = np.maximum(begun + work, np.maximum(np.roll(begun, 1), np.roll(begun, -1)))
    return float(begun.max() * len(areas) / areas.sum())


def measure(seq_len: int, world_size: int, seed: int, repeats: int) -> ShardedBatch:
    ends = documents(seed, seq_len)
    layout = Balanced(CAUSAL, seq_len, world_size, ends)
    times = []
    for _ in range(repeats):
        for cache in (balanced._balanced_runs, slices_of, plan):
            cache.clear()
        begin = process_time()
        layout.runs(0, world_size, seq_len)
        times.append(1000 * (process_time() - begin))
    schedule = describe_schedule(layout, CAUSAL, seq_len, world_size, ends)
    runs = (layout.runs(rank, world_size, seq_len) for rank in range(world_size))
    tiles = (sum(len(step.tiles) for step in plan.steps) for plan in schedule.plans)
    return ShardedBatch(
        *(seq_len, world_size, seed, len(ends) - 1, sum(schedule.received), needed(layout)),
        *(schedule.imbalance, schedule.makespan, lockstep(schedule), median(times)),
        *(max(map(len, runs)), max(tiles)),
    )


def report(console: Console, found: list[ShardedBatch]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        "\nCausal attention in documents of lognormal lengths. Tokens that travel to all ranks "
        "together, in\nthousands, as the plans move them and as they are needed; the work of the "
        "busiest rank and the\nmakespan (`span`), over the mean work of a rank; `sync` is the "
        "makespan if ranks waited for both\nneighbours at every step, with a message or without; "
        "milliseconds of the processor to shard; runs and\ntiles of a rank, at most. `old` is the "
        "layout that swapped blocks.\n"
    )
    numbers = ("moved, old", "moved", "needed", "of old", "busiest", "span, old")
    numbers += ("span", "sync, old", "sync", "ms, old", "ms", "runs", "tiles")
    table = table_of(("tokens, ranks, seed",), numbers)
    for one in found:
        old = BEFORE[one.seq_len, one.world_size][one.seed]
        table.add_row(
            f"{one.seq_len // 1024}k, {one.world_size}, {one.seed}",
            *(f"{old[0] / 1000:,.0f}", f"{one.moved / 1000:,.0f}", f"{one.needed / 1000:,.0f}"),
            *(f"1/{old[0] / one.needed:.1f}", f"{one.imbalance:.3f}"),
            *(f"{old[3]:.2f}", f"{one.makespan:.2f}", f"{old[4]:.2f}", f"{one.lockstep:.2f}"),
            *(f"{old[5]:.0f}", f"{one.milliseconds:.1f}", f"{one.num_runs}", f"{one.num_tiles}"),
        )
    console.print(table)


def main() -> None:
    quick = is_quick(__doc__, "take seconds")
    about = origin()
    sizes = list(BEFORE)[:1] if quick else list(BEFORE)
    found = [measure(*size, seed, 1 if quick else 15) for size in sizes for seed in range(4)]
    show = partial(report, found=found)
    publish("balancing", "Balancing", quick, about, {"dealt": [asdict(one) for one in found]}, show)


if __name__ == "__main__":
    main()
