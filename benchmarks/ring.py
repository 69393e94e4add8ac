"""Measure the ring on CPUs, against one process and PyTorch's own ring.

Run ``python benchmarks/ring.py``: it starts its processes itself, prints tables, and writes them
with every single time to ``benchmarks/results``. With ``--quick`` it takes less than a minute and
writes to ``out`` instead. Everything compared is timed in turns, and ratios are medians of the
ratios of neighbouring times. Leave the machine alone meanwhile.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from baselines import Stages, median_ratio, single_process, time_paired, torch_ring, zigzag_shard
from harness import (
    HEAD_DIM,
    NUM_HEADS,
    ORDERS,
    STAGES,
    is_quick,
    op_stages,
    origin,
    publish,
    spawn,
    table_of,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.compute.kernels import Scores
from dtensor_ring.compute.memory import in_order
from dtensor_ring.ops.options import Batch, Call, Place, default_scale
from dtensor_ring.planning.mask import Mask
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy

MAX_SECONDS = 250
"""For the repeats of a case, unless two take longer: some processors are slow at bfloat16."""
SETTING = (
    f"Causal, zigzag, batch 1, {NUM_HEADS} heads of {HEAD_DIM}, gloo, one thread a rank. "
    "Milliseconds are medians;\nratios are medians of the ratios of neighbouring times. "
    "`torch` is PyTorch's ring, `gathered` the same with its all-gather."
)


@dataclass(frozen=True)
class Case:
    """What is measured; `order` is a name of `ORDERS`."""

    world_size: int
    seq_len: int
    dtype: str
    order: str
    stub: bool
    repeats: int


@dataclass(frozen=True)
class Measurement:
    """Seconds by contender, stage and repeat."""

    case: Case
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)

    def ratio(self, name: str, other: str, stage: int) -> float:
        return median_ratio(self.seconds[name][stage], self.seconds[other][stage])

    def milliseconds(self, name: str, stage: int) -> float:
        return 1e3 * median(self.seconds[name][stage])


Columns = dict[str, Callable[[Case], str]]


def cases(quick: bool) -> list[Case]:
    """What two ranks compute."""
    repeats = {4096: 2} if quick else {4096: 15, 16384: 7, 65536: 2}
    return [
        Case(2, seq_len, dtype, "B, L, N, H", False, number)
        for seq_len, number in repeats.items()
        for dtype in ("float32", "bfloat16")
    ]


def random_inputs(case: Case) -> list[Tensor]:
    """Gradient of the output, query, key and value of the whole sequence, alike on every rank."""
    torch.manual_seed(0)
    shape, dtype = (1, NUM_HEADS, case.seq_len, HEAD_DIM), getattr(torch, case.dtype)
    return [in_order(torch.randn(shape), ORDERS[case.order], dtype) for _ in range(4)]


def shards_of(case: Case, whole: list[Tensor], rank: int) -> list[Tensor]:
    """A rank's shards of the whole tensors."""
    shards = (zigzag_shard(x, 2, rank, case.world_size) for x in whole)
    return [in_order(x, ORDERS[case.order], x.dtype) for x in shards]


def our_ring(
    case: Case,
    shards: list[Tensor],
    group: dist.ProcessGroup,
    policy: TransferPolicy = DEFAULT_POLICY,
) -> Stages:
    """Our op under a causal mask."""
    call = Call(
        Batch(),
        Scores(Mask.causal(), default_scale(HEAD_DIM)),
        Place("zigzag", "ring", case.seq_len, case.seq_len, group.group_name, policy),
    )
    return op_stages(shards, call)


def check_agreement(contenders: dict[str, Stages], case: Case, rank: int) -> None:
    """Compare this rank's outputs and gradients: all contenders must do the same work."""
    tolerance = 1e-4 if case.dtype == "float32" else 5e-2
    results = {
        name: [x for stage in stages for x in stage()] for name, stages in contenders.items()
    }
    if rank == 0:
        whole = results["single"]
        results["single"] = [zigzag_shard(x, 2, 0, case.world_size) for x in whole]
    for name in results.keys() - {"ours"} - ({"single"} if rank else set()):
        for ours, theirs in zip(results["ours"], results[name], strict=True):
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    group = mesh.get_group()
    rank, whole = group.rank(), random_inputs(case)
    shards = shards_of(case, whole, rank)
    contenders = torch_rings(case, mesh, shards) | {
        "ours": our_ring(case, shards, group),
        "single": single_process(whole, case.world_size),
    }
    case = affordable(case, lambda: check_agreement(contenders, case, rank))
    barrier = partial(dist.barrier, group)
    return Measurement(case, time_paired(contenders, case.repeats, barrier, warmups=0))


def torch_rings(case: Case, mesh: DeviceMesh, shards: list[Tensor]) -> dict[str, Stages]:
    """PyTorch's ring, and the same with its all-gather."""
    return {
        "torch": torch_ring(mesh, shards, case.stub),
        "gathered": torch_ring(mesh, shards, case.stub, "allgather"),
    }


def affordable(case: Case, warm_up: Callable[[], None]) -> Case:
    """The case with as many repeats as its time allows, by what a first round takes on rank 0."""
    start = time.perf_counter()
    warm_up()
    num = [max(2, min(case.repeats, int(MAX_SECONDS / (time.perf_counter() - start))))]
    dist.broadcast_object_list(num)
    return replace(case, repeats=num[0])


def run(todo: list[Case], measure: Callable[[Case, DeviceMesh], Measurement]) -> list[Measurement]:
    """Measure the cases, each in a group of processes as large as it asks for."""
    measurements = []
    for world_size in sorted({case.world_size for case in todo}):
        now = [case for case in todo if case.world_size == world_size]
        results = spawn(world_size, measure, now)
        measurements += [Measurement(Case(**r["case"]), r["seconds"]) for r in results]
    return measurements


def table(measurements: list[Measurement], columns: Columns, names: list[str]) -> Table:
    """One row for each measurement and stage: medians, then ratios of ours and of the others."""
    ratios = [(name, names[-1]) for name in names[:-1]] + [("ours", "torch")]
    numbers = [f"{name} ms" for name in names] + [f"{a}/{b}" for a, b in ratios]
    result = table_of([*columns, "what"], numbers)
    for m in measurements:
        for stage, what in enumerate(STAGES):
            case = [column(m.case) for column in columns.values()]
            times = [f"{m.milliseconds(name, stage):.1f}" for name in names]
            result.add_row(
                *case, what, *times, *(f"{m.ratio(*pair, stage):.3f}" for pair in ratios)
            )
    return result


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(f"\n{SETTING}\n")
    console.print("## Two ranks, against one process with two threads on the whole sequence")
    columns: Columns = {
        "tokens": lambda case: f"{case.seq_len:,}",
        "dtype": lambda case: case.dtype,
    }
    console.print(table(measurements, columns, ["ours", "torch", "gathered", "single"]))


def write_card(
    name: str,
    title: str,
    quick: bool,
    measure_all: Callable[[], list[Measurement]],
    report: Callable[[Console, list[Measurement]], None],
) -> None:
    """Measure, then print the card and write it."""
    about = origin()  # with the load before
    measurements = measure_all()
    measured = {"measurements": [asdict(m) for m in measurements]}
    publish(name, title, quick, about, measured, partial(report, measurements=measurements))


def main() -> None:
    quick = is_quick(__doc__)
    write_card("ring", "The ring on CPUs", quick, lambda: run(cases(quick), measure), report)


if __name__ == "__main__":
    main()
