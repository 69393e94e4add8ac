"""Measure what it saves to send keys directly to the few ranks that see them.

Run ``python benchmarks/routes.py``: it starts 4 and then 8 processes itself, prints a table, and
writes it with every single time to ``benchmarks/results``. With ``--quick`` it repeats less and
writes to ``out`` instead. Both routes are timed in turns, and ratios are medians of the ratios of
neighbouring times. Leave the machine alone meanwhile.
"""

from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from around import StubKernel, ring_stages
from baselines import median_ratio, time_paired
from harness import (
    HEAD_DIM,
    NUM_HEADS,
    STAGES,
    is_quick,
    origin,
    publish,
    random_shards,
    spawn,
    table_of,
)
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import Mask, ZigZag
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.plan import Plan, plan

SEQ_LEN = 32768
ROUTES = "around", "direct"
ATTENTIONS = {
    "window of 1,024": (Mask.sliding(1024), None),
    "documents of 3,000": (Mask.causal(), ((*range(0, SEQ_LEN, 3000), SEQ_LEN),)),
}


@dataclass(frozen=True)
class Case:
    """What is measured; `attention` is a name of `ATTENTIONS`."""

    world_size: int
    attention: str
    stub: bool
    repeats: int

    def plans(self, route: str) -> list[Plan]:
        """Plans of all ranks under zigzag, by this route whatever the planner would choose."""
        mask, documents = ATTENTIONS[self.attention]
        return [
            plan(
                *(ZigZag(), mask, rank, self.world_size, SEQ_LEN, as_documents(documents)),
                strategy=route,
            )
            for rank in range(self.world_size)
        ]


@dataclass(frozen=True)
class Measurement:
    """Seconds by route, stage and repeat."""

    case: Case
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    group = mesh.get_group()
    shards = random_shards(group.rank(), SEQ_LEN // case.world_size)
    contenders = {
        route: ring_stages(
            StubKernel() if case.stub else KERNELS["cpu_flash"],
            *(case.plans(route)[group.rank()], shards, group),
        )
        for route in ROUTES
    }
    around, direct = ([x for stage in stages for x in stage()] for stages in contenders.values())
    if not case.stub:
        torch.testing.assert_close(direct, around, atol=1e-4, rtol=1e-4)
    seconds = time_paired(contenders, case.repeats, lambda: dist.barrier(group))
    return Measurement(case, seconds)


def table(measurements: list[Measurement]) -> Table:
    """Two rows for each case."""
    texts, numbers = ("ranks", "attention", "kernel"), ("steps", "tokens", "ms", "direct/around")
    result = table_of((*texts, "what"), numbers)
    for m in measurements:
        plans = [m.case.plans(route) for route in ROUTES]
        steps = [str(ranks[0].num_steps) for ranks in plans]
        tokens = [f"{max(plan.num_received for plan in ranks):,}" for ranks in plans]
        for stage, what in enumerate(STAGES):
            around, direct = (m.seconds[route][stage] for route in ROUTES)
            result.add_row(
                *(str(m.case.world_size), m.case.attention, "none" if m.case.stub else "aten"),
                *(what, ", ".join(steps), " and ".join(tokens)),
                f"{1e3 * median(around):.1f} and {1e3 * median(direct):.1f}",
                f"{median_ratio(direct, around):.3f}",
            )
    return result


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        f"\n{SEQ_LEN:,} tokens, zigzag, batch 1, {NUM_HEADS} heads of {HEAD_DIM}, float32, gloo, "
        "one thread a rank. First around the\nring, then direct: steps, tokens whose keys and "
        "values come to the rank that receives most, and the time\nof the slowest rank; around "
        "aten's kernel, or kernels that take no time.\n"
    )
    console.print(table(measurements))


def main() -> None:
    quick = is_quick(__doc__)
    about, measurements = origin(), []
    for world_size in (4,) if quick else (4, 8):
        todo = [
            Case(world_size, name, stub, 2 if quick else 15 if stub else 7)
            for stub in (False, True)
            for name in ATTENTIONS
        ]
        for found in spawn(world_size, measure, todo):
            measurements.append(Measurement(Case(**found["case"]), found["seconds"]))
    measured = {"measurements": [asdict(m) for m in measurements]}
    show = partial(report, measurements=measurements)
    publish("routes", "Around the ring, or direct", quick, about, measured, show)


if __name__ == "__main__":
    main()
