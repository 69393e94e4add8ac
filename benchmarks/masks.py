"""Measure what a visible pair costs under windows, documents and slices, next to dense causal.

Run ``python benchmarks/masks.py``: it starts two processes itself, prints a table, and writes it
with every single time to ``benchmarks/results``. With ``--quick`` it repeats less and writes to
``out`` instead. All attentions are timed in turns, and ratios are medians of the ratios of
neighbouring times. Leave the machine alone meanwhile.
"""

from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random
from statistics import median

import torch
import torch.distributed as dist
from baselines import Stages, median_ratio, time_paired
from harness import (
    HEAD_DIM,
    NUM_HEADS,
    STAGES,
    is_quick,
    op_stages,
    origin,
    publish,
    random_shards,
    spawn,
    table_of,
)
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import (
    Balanced,
    Contiguous,
    Mask,
    Slices,
    ZigZag,
    describe_schedule,
    sequence_runs,
)
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.lab.schedule import Schedule
from dtensor_ring.ops.options import Batch, Call, Place, default_scale
from dtensor_ring.planning.layout import Layout

WORLD_SIZE, SEQ_LEN = 2, 16384
WINDOW, NUM_DOCUMENTS, BLOCK = 1024, 16, 256
DENSE = "causal, zigzag"


@dataclass(frozen=True)
class Attention:
    """Which pairs are visible, and how their tokens are sharded."""

    mask: Mask | None
    layout: Layout
    cu_seqlens: tuple[int, ...] | None = None
    slices: Slices | None = None

    def schedule(self) -> Schedule:
        seen = self.cu_seqlens, self.slices
        return describe_schedule(self.layout, self.mask, SEQ_LEN, WORLD_SIZE, *seen)

    def call(self, group: dist.ProcessGroup) -> Call:
        documents = None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens).int()
        runs = sequence_runs(self.layout) if isinstance(self.layout, Balanced) else None
        slices = None if self.slices is None else torch.from_numpy(self.slices.numbers)
        return Call(
            Batch(documents, runs=runs, slices=slices),
            Scores(self.mask or Mask.full(), default_scale(HEAD_DIM)),
            Place(self.layout.spec, "ring", SEQ_LEN, SEQ_LEN, group.group_name),
        )


@dataclass(frozen=True)
class Measurement:
    """Seconds by attention, stage and repeat."""

    seconds: dict[str, list[list[float]]] = field(default_factory=dict)


def attentions() -> dict[str, Attention]:
    """What is compared, dense causal first."""
    causal, window = Mask.causal(), Mask.sliding(WINDOW)
    cuts = Random(0).sample(range(1, SEQ_LEN), NUM_DOCUMENTS - 1)
    bounds = (0, *sorted(cuts), SEQ_LEN)
    zigzag, contiguous = ZigZag(), Contiguous()
    balanced, balanced_window = (
        Balanced(mask, SEQ_LEN, WORLD_SIZE, bounds) for mask in (causal, window)
    )
    return {
        DENSE: Attention(causal, zigzag),
        "window, zigzag": Attention(window, zigzag),
        "window, contiguous": Attention(window, contiguous),
        "documents, zigzag": Attention(causal, zigzag, bounds),
        "documents, balanced": Attention(causal, balanced, bounds),
        "window + documents, balanced": Attention(window, balanced_window, bounds),
    } | {
        f"{name}, balanced": Attention(
            None, Balanced(None, SEQ_LEN, WORLD_SIZE, slices=slices), slices=slices
        )
        for name, slices in by_slices().items()
    }


def by_slices() -> dict[str, Slices]:
    """What models see beside causal text."""
    images = range(BLOCK, SEQ_LEN, 4 * BLOCK)
    return {
        "block-causal": Slices.block_causal([2 * BLOCK] * (SEQ_LEN // (2 * BLOCK))),
        "shared prefix": Slices.shared_prefix(SEQ_LEN // 2, [SEQ_LEN // 16] * 8),
        "images in text": Slices.blocks([0, SEQ_LEN], images, [x + BLOCK for x in images]),
    }


def measure(repeats: int, mesh: DeviceMesh) -> Measurement:
    group = mesh.get_group()
    shards = random_shards(group.rank(), SEQ_LEN // WORLD_SIZE)
    contenders: dict[str, Stages] = {
        name: op_stages(shards, attention.call(group)) for name, attention in attentions().items()
    }
    return Measurement(time_paired(contenders, repeats, lambda: dist.barrier(group)))


def table(measurement: Measurement) -> Table:
    """Two rows for each attention, with its times per pair, also relative to dense causal."""
    numbers = ("M pairs", "busiest/mean", "ms", "ps a pair", "to causal")
    result = table_of(("attention", "what"), numbers)
    schedules = {name: attention.schedule() for name, attention in attentions().items()}
    pairs = {name: NUM_HEADS * sum(map(sum, s.areas)) for name, s in schedules.items()}
    for name, schedule in schedules.items():
        for stage, what in enumerate(STAGES):
            times = measurement.seconds[name][stage]
            ratio = median_ratio(times, measurement.seconds[DENSE][stage])
            result.add_row(
                *(name, what, f"{pairs[name] / 1e6:.0f}", f"{schedule.imbalance:.3f}"),
                *(f"{1e3 * median(times):.1f}", f"{1e12 * median(times) / pairs[name]:.0f}"),
                f"{ratio * pairs[DENSE] / pairs[name]:.2f}",
            )
    return result


def report(console: Console, measurement: Measurement) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        f"\n{SEQ_LEN:,} tokens, batch 1, {NUM_HEADS} heads of {HEAD_DIM}, float32, {WORLD_SIZE} "
        f"ranks of one thread, gloo.\nThe window is {WINDOW:,} tokens, an image has {BLOCK}, a "
        f"block {2 * BLOCK}; 8 answers share a prefix of half the tokens;\nthe {NUM_DOCUMENTS} "
        "packed documents are of uneven length. Pairs are those that are visible,\nover all heads "
        "and ranks; busiest/mean is how evenly they are sharded. A time is that of the\nslowest "
        "rank. The last column is the time per pair over that of dense causal.\n"
    )
    console.print(table(measurement))


def main() -> None:
    quick = is_quick(__doc__)
    about = origin()
    (result,) = spawn(WORLD_SIZE, measure, [2 if quick else 15])
    measurement = Measurement(**result)
    show = partial(report, measurement=measurement)
    publish("masks", "Masks on CPUs", quick, about, asdict(measurement), show)


if __name__ == "__main__":
    main()
