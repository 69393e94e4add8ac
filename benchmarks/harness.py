"""What the benchmarks share: the processes, the tensors, and how results are kept."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring.compute.memory import TOKEN_MAJOR, in_order
from dtensor_ring.ops.options import Call, flatten
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op

if TYPE_CHECKING:  # they are found only where a benchmark is started as a script
    from baselines import Stages
    from network import Hosts

ROOT = Path(__file__).resolve().parent.parent
NUM_HEADS, HEAD_DIM = 8, 64
WIDTH = 160
PORT = 29513
STAGES = ("forward", "forward + backward")
ORDERS = {"B, L, N, H": TOKEN_MAJOR, "B, N, L, H": (0, 1, 2, 3)}
"""Orders of the dimensions in memory, by name."""

Measure = Callable[[Any, DeviceMesh], Any]
"""Measures a case, and returns a dataclass."""


def random_shards(rank: int, num_tokens: int) -> list[Tensor]:
    """Gradient of the output, query, key and value of this rank's tokens."""
    torch.manual_seed(rank)
    shape = (1, NUM_HEADS, num_tokens, HEAD_DIM)
    return [in_order(torch.randn(shape), TOKEN_MAJOR, torch.float32) for _ in range(4)]


def op_stages(shards: list[Tensor], call: Call) -> Stages:
    """Our op, as autograd calls it."""
    grad_out, *inputs = shards
    options = flatten(call)
    kept: list[Tensor] = []

    def forward() -> list[Tensor]:
        kept[:] = ring_op(*inputs, *options)
        return kept[:1]

    def backward() -> list[Tensor]:
        return ring_backward_op(grad_out, None, *inputs, *kept, *options)[:3]

    return forward, backward


def work(
    rank: int, world_size: int, folder: str, measure: Measure, todo: list[Any], bind: bool
) -> None:
    """Measure the cases of one world size; rank 0 leaves the results in the folder."""
    if bind and world_size <= (os.cpu_count() or 1):
        os.sched_setaffinity(0, {rank})  # threads that come inherit it
    store = dist.FileStore(f"{folder}/store{world_size}", world_size)
    connected = partial(dist.init_process_group, store=store, timeout=timedelta(minutes=10))
    _measure_all(measure, todo, connected, rank, world_size, folder)


def _measure_all(
    measure: Measure,
    todo: list[Any],
    connected: Callable[..., None],
    rank: int,
    world_size: int,
    folder: str,
) -> None:
    """Measure cases on one thread; rank 0 leaves the results in the folder."""
    torch.set_num_threads(1)
    connected(backend="gloo", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    with torch.no_grad():
        results = [asdict(measure(case, mesh)) for case in todo]
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def spawn(
    world_size: int, measure: Measure, todo: list[Any], bind: bool = False
) -> list[dict[str, Any]]:
    """Measure each case in a new group of processes of one thread each.

    With `bind`, each process is bound to one core, if there are enough. Unbound threads of the
    transport may move between cores at each message, which takes longer than a small message.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        args = world_size, folder, measure, todo, bind
        # A test's fork server has imported torch already.
        mp.start_processes(work, args, nprocs=world_size, start_method="forkserver")
        return json.loads(Path(folder, "results.json").read_text())


def spawn_on_hosts(network: Hosts, script: str, todo: list[Any]) -> list[dict[str, Any]]:
    """Measure cases in a new process on each host: the script is called with a number, that of its
    host, and arguments that it passes on to `work_on_host`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cases.json").write_text(json.dumps([asdict(case) for case in todo]))
        network.run(Path(script).resolve(), folder, network.address(0))
        return json.loads(Path(folder, "results.json").read_text())


def work_on_host(
    measure: Measure, make_case: Callable[..., Any], rank: str, folder: str, address: str
) -> None:
    """Measure the cases in the folder; the first host leaves the results there."""
    todo = [make_case(**case) for case in json.loads(Path(folder, "cases.json").read_text())]
    where = f"tcp://{address}:{PORT}"
    connected = partial(dist.init_process_group, init_method=where, timeout=timedelta(minutes=10))
    _measure_all(measure, todo, connected, int(rank), todo[0].world_size, folder)


def origin() -> dict[str, str]:
    """Where the numbers come from: versions and hardware, no names of hosts or folders."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return {
        "command": " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "processor": f"{os.cpu_count()} x {model[1] if model else platform.machine()}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def is_quick(doc: str | None, help: str = "take less than a minute") -> bool:
    """Whether the command line asks for a quick run, which is all that it may ask for."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=help)
    return parser.parse_args().quick


def table_of(texts: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table in Markdown, whose columns of numbers are aligned on the right."""
    table = Table(box=MARKDOWN)
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def folder_of(hardware: str) -> Path:
    """Folder of a card: "2 x Intel(R) Xeon(R) Processor" is "2-x-intel-xeon"."""
    words = re.sub(r"\(\w+\)|\bprocessor\b|,.*", " ", hardware.lower())
    return ROOT / "benchmarks" / "results" / "-".join(re.findall(r"[\w.]+", words))


def publish(
    name: str,
    title: str,
    quick: bool,
    about: dict[str, str],
    measured: dict[str, Any],
    show: Callable[[Console], None],
    folder: Path | None = None,
) -> Path:
    """Write what was measured into the folder returned, that of the hardware, and show it.

    What was quick goes to `out`, unless a folder is given.
    """
    folder = folder or (Path("out") if quick else folder_of(about.get("GPU", about["processor"])))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"about": about, **measured}) + "\n")
    with (folder / f"{name}.md").open("w") as file:
        for console in (Console(file=file, width=WIDTH), Console(width=WIDTH)):
            console.print(f"# {title}\n")
            for what, text in about.items():
                console.print(f"- {what}: {text}", highlight=False)
            show(console)
    return folder
