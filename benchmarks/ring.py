"""Measure the ring on CPUs: against one process, PyTorch's own ring, and bare transfers.

Run ``python benchmarks/ring.py``: it starts its processes itself, prints tables, and writes them
with every single time to ``benchmarks/results``. With ``--quick`` it takes less than a minute and
writes to ``out`` instead. Everything compared is timed in turns, and ratios are medians of the
ratios of neighbouring times. Leave the machine alone meanwhile.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from baselines import (
    Stages,
    StubKernels,
    median_ratio,
    single_process,
    time_paired,
    torch_ring,
    transfers,
    zigzag_shard,
)
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring.execute import Saved, Scoring
from dtensor_ring.kernels import Kernel
from dtensor_ring.layout import ZigZag
from dtensor_ring.mask import Mask
from dtensor_ring.op import Options, default_scale, ring_backward_op, ring_op
from dtensor_ring.plan import plan
from dtensor_ring.ring import ring_backward, ring_forward

ROOT = Path(__file__).resolve().parent.parent
NUM_HEADS, HEAD_DIM = 8, 64
STAGES = ("forward", "forward + backward")
ORDERS = ("B, L, N, H", "B, N, L, H")


@dataclass(frozen=True)
class Case:
    """What is measured; `order` is that of the dimensions in memory."""

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
    """Those with real kernels, then those with stubs."""
    repeats = {4096: 2} if quick else {4096: 15, 16384: 9}
    orders = ORDERS[:1] if quick else ORDERS
    return [
        Case(2, seq_len, dtype, ORDERS[0], False, number)
        for seq_len, number in repeats.items()
        for dtype in ("float32", "bfloat16")
    ] + [
        Case(world_size, 16384, "float32", order, True, 5 if quick else 30)
        for world_size in (2, 4)
        for order in orders
    ]


def in_order(x: Tensor, order: str) -> Tensor:
    """The same tensor with its dimensions in that order in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if order == ORDERS[0] else x.contiguous()


def random_inputs(case: Case) -> list[Tensor]:
    """Gradient of the output, query, key and value of the whole sequence, alike on every rank."""
    torch.manual_seed(0)
    shape, dtype = (1, NUM_HEADS, case.seq_len, HEAD_DIM), getattr(torch, case.dtype)
    return [in_order(torch.randn(shape).to(dtype), case.order) for _ in range(4)]


def our_ring(case: Case, shards: list[Tensor], group: dist.ProcessGroup) -> Stages:
    """Our op, as autograd calls it."""
    grad_out, *inputs = shards
    scale = default_scale(HEAD_DIM)
    options = Options(
        seq_len=case.seq_len,
        key_seq_len=case.seq_len,
        layout="zigzag",
        right=0,
        scale=scale,
        group_name=group.group_name,
    )
    kept: list[Tensor] = []

    def forward() -> list[Tensor]:
        kept[:] = ring_op(*inputs, *options)
        return kept[:1]

    def backward() -> list[Tensor]:
        return ring_backward_op(grad_out, None, *inputs, *kept, *options)[:3]

    return forward, backward


class StubKernel(Kernel):
    """A kernel that computes nothing."""

    name = "stub"

    def __init__(self) -> None:
        self.forwards, self.backwards = StubKernels(), StubKernels()

    def missing(self) -> None:
        return None

    def supports(self, problem: object) -> None:
        return None

    def forward(self, query: Tensor, *_: Any) -> Any:
        return self.forwards.forward(query)

    def backward(self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
        return self.backwards.backward(query=query, key=key, value=value)


def our_ring_around_stub(case: Case, shards: list[Tensor], group: dist.ProcessGroup) -> Stages:
    """Our ring around kernels that compute nothing."""
    grad_out, query, *rest = shards
    pair = rest[0], rest[1]
    kernel = StubKernel()
    scoring = Scoring(kernel, default_scale(HEAD_DIM))
    schedule = plan(ZigZag(), Mask.causal(), group.rank(), case.world_size, case.seq_len)
    kept: list[Tensor] = []

    def forward() -> list[Tensor]:
        kernel.forwards.restart()
        kept[:] = ring_forward(query, pair, schedule, scoring, group)
        return kept[:1]

    def backward() -> tuple[Tensor, ...]:
        kernel.backwards.restart()
        return ring_backward(Saved(grad_out, query, *kept), pair, schedule, scoring, group)

    return forward, backward


def check_agreement(contenders: dict[str, Stages], case: Case, rank: int) -> None:
    """Compare this rank's outputs and gradients: all contenders must do the same work."""
    tolerance = 1e-4 if case.dtype == "float32" else 5e-2
    results = {
        name: [x for stage in stages for x in stage()] for name, stages in contenders.items()
    }
    if rank == 0:
        whole = results["single"]
        results["single"] = [zigzag_shard(x, 2, 0, case.world_size) for x in whole]
    for name in ("torch", "single") if rank == 0 else ("torch",):
        for ours, theirs in zip(results["ours"], results[name], strict=True):
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    group = mesh.get_group()
    rank, whole = group.rank(), random_inputs(case)
    shards = [in_order(zigzag_shard(x, 2, rank, case.world_size), case.order) for x in whole]
    contenders = {"torch": torch_ring(mesh, shards, case.stub)}
    if case.stub:
        contenders["ours"] = our_ring_around_stub(case, shards, group)
        contenders["bare"] = transfers(group, *shards[2:])
    else:
        contenders["ours"] = our_ring(case, shards, group)
        contenders["single"] = single_process(whole, case.world_size)
        check_agreement(contenders, case, rank)
    seconds = time_paired(
        contenders, case.repeats, lambda: dist.barrier(group), warmups=3 if case.stub else 0
    )
    return Measurement(case, seconds)


def work(rank: int, world_size: int, folder: str, todo: list[Case]) -> None:
    """Measure the cases of one world size; rank 0 leaves the results in the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{world_size}", world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=10)
    )
    mesh = init_device_mesh("cpu", (world_size,))
    with torch.no_grad():
        results = [asdict(measure(case, mesh)) for case in todo]
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def run(todo: list[Case]) -> list[Measurement]:
    """Measure the cases, each in a group of processes as large as it asks for."""
    os.environ["OMP_NUM_THREADS"] = "1"
    measurements = []
    for world_size in sorted({case.world_size for case in todo}):
        now = [case for case in todo if case.world_size == world_size]
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (world_size, folder, now), nprocs=world_size)
            results = json.loads(Path(folder, "results.json").read_text())
        measurements += [Measurement(Case(**r["case"]), r["seconds"]) for r in results]
    return measurements


def table(measurements: list[Measurement], columns: Columns, names: list[str]) -> Table:
    """One row for each measurement and stage: medians, then ratios of ours and of the others."""
    ratios = [("ours", names[-1]), ("torch", names[-1]), ("ours", "torch")]
    result = Table(*columns, "what", box=MARKDOWN)
    for heading in [f"{name} ms" for name in names] + [f"{a}/{b}" for a, b in ratios]:
        result.add_column(heading, justify="right", no_wrap=True)
    for m in measurements:
        for stage, what in enumerate(STAGES):
            case = [column(m.case) for column in columns.values()]
            times = [f"{m.milliseconds(name, stage):.1f}" for name in names]
            result.add_row(
                *case, what, *times, *(f"{m.ratio(*pair, stage):.3f}" for pair in ratios)
            )
    return result


def origin() -> dict[str, str]:
    """Where the numbers come from: versions and hardware, no names of hosts or folders."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return {
        "command": " ".join(["python benchmarks/ring.py", *sys.argv[1:]]),
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "processor": f"{os.cpu_count()} x {model[1] if model else platform.machine()}",
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def report(console: Console, about: dict[str, str], measurements: list[Measurement]) -> None:
    """Print the tables, in Markdown."""
    console.print("# The ring on CPUs\n")
    for what, text in about.items():
        console.print(f"- {what}: {text}", highlight=False)
    console.print(
        f"\nCausal, zigzag, batch 1, {NUM_HEADS} heads of {HEAD_DIM}, gloo, one thread a rank. "
        "Milliseconds are medians;\nratios are medians of the ratios of neighbouring times.\n"
    )
    console.print("## Two ranks, against one process with two threads on the whole sequence")
    whole: Columns = {"tokens": lambda case: f"{case.seq_len:,}", "dtype": lambda case: case.dtype}
    whole_runs, stubs = ([m for m in measurements if m.case.stub == x] for x in (False, True))
    console.print(table(whole_runs, whole, ["ours", "torch", "single"]))
    console.print("## Around kernels that take no time: 16,384 tokens, float32")
    around: Columns = {
        "ranks": lambda case: str(case.world_size),
        "memory order": lambda case: case.order,
    }
    console.print(table(stubs, around, ["ours", "torch", "bare"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="take less than a minute")
    quick = parser.parse_args().quick
    about = origin()
    measurements = run(cases(quick))
    folder = ROOT / "out" if quick else ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    record = {"about": about, "measurements": [asdict(m) for m in measurements]}
    (folder / "ring-cpu.json").write_text(json.dumps(record) + "\n")
    with (folder / "ring-cpu.md").open("w") as file:
        report(Console(file=file, width=120), about, measurements)
    report(Console(width=120), about, measurements)


if __name__ == "__main__":
    main()
