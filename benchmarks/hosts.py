"""The ring between hosts, on links of limited rate: what of the transfers is exposed.

    sudo .venv/bin/python benchmarks/hosts.py

Hosts are network namespaces of this machine (see network.py), with one process of one thread each.
Three links: as fast as they get, one that moves a shard in four fifths of the time that a step
computes, and one on which that takes many times as long. With ``--eight-bits`` keys and values
travel as bfloat16, as int8 and as e4m3 instead, on links that move a shard of bfloat16 in 1, 4 and
15 times what a step computes. With ``--quick`` the sequence is short and the results go to ``out``.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from baselines import Stages, median_ratio, time_paired, torch_ring, transfers
from harness import HEAD_DIM, NUM_HEADS, origin, publish, table_of
from network import Hosts, hosts
from rich.console import Console
from rich.table import Table
from ring import Case, our_ring, random_inputs, shards_of
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from dtensor_ring import TransferPolicy

HIDDEN, SLOW = 0.8, 15
SLOW_FOR_EIGHT_BITS = 1, 4, 15
EIGHT_BITS = "int8", "fp8"
COMPUTE, EXPOSED = ("tile", "merge"), ("send", "wait", "send sums", "wait for sums")
NUM_PROFILED = 6
PORT = 29512


@dataclass(frozen=True)
class Span:
    """A part of a step, in seconds from the beginning."""

    ring: str
    step: int
    what: str
    start: float
    end: float


@dataclass(frozen=True)
class Measurement:
    """Seconds by contender, stage and repeat; and spans by call and rank."""

    world_size: int
    slowness: float
    """Time of a hop over that of a step's kernels, forward: the link's limit; 0 is no limit."""
    bytes_per_second: float | None
    seconds: dict[str, list[list[float]]]
    spans: list[list[list[Span]]]

    def spent(self, ring: str, kinds: tuple[str, ...]) -> float:
        """Seconds that a ring spends on these, on the average of ranks; the median of calls."""
        return median(
            sum(
                x.end - x.start
                for spans in call
                for x in spans
                if x.ring == ring and x.what in kinds
            )
            / self.world_size
            for call in self.spans
        )

    def alone(self, name: str, stage: int) -> list[float]:
        """Seconds of forward, or of backward without the forward before it, by repeat."""
        forward, both = self.seconds[name]
        return [b - a for a, b in zip(forward, both, strict=True)] if stage else forward


def work(rank: int, folder: Path, address: str) -> None:
    """The process of a host."""
    case = Case(**json.loads((folder / "case.json").read_text()))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{PORT}",
        rank=rank,
        world_size=case.world_size,
        timeout=timedelta(minutes=5),
    )
    mesh = init_device_mesh("cpu", (case.world_size,))
    group, shards = mesh.get_group(), shards_of(case, random_inputs(case), rank)
    ours = our_ring(case, shards, group)
    contenders = {"ring": ours, "bare": transfers(group, *shards[2:])}
    if case.dtype == "bfloat16":
        for name in EIGHT_BITS:
            contenders[name] = our_ring(case, shards, group, TransferPolicy(kv_dtype=name))
    else:
        contenders["gather"] = torch_ring(mesh, shards, stub=False, rotation="allgather")
    with torch.no_grad():
        seconds = time_paired(contenders, case.repeats, lambda: dist.barrier(group))
        spans = [spans_of(ours, group) for _ in range(NUM_PROFILED)][1:]  # the first warms up
    found = {"seconds": seconds, "spans": [[asdict(x) for x in call] for call in spans]}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier(group)
    dist.destroy_process_group()


def spans_of(stages: Stages, group: dist.ProcessGroup) -> list[Span]:
    """What the labels of the ring say in a profile of one call of each stage."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for stage in stages:
            dist.barrier(group)
            stage()
    spans, zeros = [], {}
    for event in profiler.events():
        if event.name.startswith("ring "):
            place, what = event.name.split(": ")
            ring, step, _ = place.removeprefix("ring ").split(", ")
            zero = zeros.setdefault(ring, event.time_range.start)
            times = ((x - zero) / 1e6 for x in (event.time_range.start, event.time_range.end))
            spans.append(Span(ring, int(step.removeprefix("step ")), what, *times))
    return spans


def measure(network: Hosts, case: Case, compute: float, slowness: float) -> Measurement:
    """On links on which a hop takes so much of the seconds that a step computes."""
    itemsize = getattr(torch, case.dtype).itemsize
    message = 2 * NUM_HEADS * HEAD_DIM * itemsize * case.seq_len / case.world_size
    rate = message / (slowness * compute) if slowness else None
    network.limit(rate)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(asdict(case)))
        network.run(Path(__file__).resolve(), name, network.address(0))
        found = [
            json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(case.world_size)
        ]
    by_rank = [[[Span(**x) for x in call] for call in rank["spans"]] for rank in found]
    spans = [list(call) for call in zip(*by_rank, strict=True)]
    return Measurement(case.world_size, slowness, rate, found[0]["seconds"], spans)


def run(world_size: int, seq_len: int, repeats: int) -> list[Measurement]:
    """On a fast link first, which says how long a step computes."""
    with hosts(world_size) as network:
        case = Case(world_size, seq_len, "float32", "B, L, N, H", False, repeats)
        fast = measure(network, case, 0, 0)
        compute = fast.spent("forward", COMPUTE) / world_size
        hidden = measure(network, case, compute, HIDDEN)
        slow = measure(network, replace(case, repeats=2), compute, SLOW / (world_size - 1))
        return [fast, hidden, slow]


def run_eight_bits(world_size: int, seq_len: int, repeats: int) -> list[Measurement]:
    """On a fast link first, then on slow ones; tensors are bfloat16."""
    with hosts(world_size) as network:
        case = Case(world_size, seq_len, "bfloat16", "B, L, N, H", False, repeats)
        fast = measure(network, case, 0, 0)
        compute, case = fast.spent("forward", COMPUTE) / world_size, replace(case, repeats=3)
        return [fast, *(measure(network, case, compute, x) for x in SLOW_FOR_EIGHT_BITS)]


def table_of_eight_bits(measurements: list[Measurement]) -> Table:
    names = ("ring", *EIGHT_BITS)
    headings = ("limit", "MB/s", "step ms", "hop ms", *(f"{name} ms" for name in names))
    result = table_of(("hosts", "what"), (*headings, *(f"ring/{name}" for name in EIGHT_BITS)))
    for m in measurements:
        for stage, what in enumerate(("forward", "backward")):
            hop = median(m.alone("bare", stage)) / (m.world_size - 1)
            times = {name: m.alone(name, stage) for name in names}
            limit = f"{m.slowness:.1f}", f"{(m.bytes_per_second or 0) / 1e6:.1f}"
            step = m.spent(what, COMPUTE) / m.world_size
            result.add_row(
                *(str(m.world_size), what, *(limit if m.slowness else "--")),
                *(f"{1e3 * x:.1f}" for x in (step, hop)),
                *(f"{1e3 * median(times[name]):.0f}" for name in names),
                *(f"{median_ratio(times['ring'], times[name]):.3f}" for name in EIGHT_BITS),
            )
    return result


def table(measurements: list[Measurement]) -> Table:
    headings = ("limit", "MB/s", "step ms", "hop ms", "exposed ms", "exposed/hop")
    headings += ("ring ms", "bare ms", "gather ms", "ring/bare", "ring/gather")
    result = table_of(("hosts", "what"), headings)
    for m in measurements:
        for stage, what in enumerate(("forward", "backward")):
            hop = median(m.alone("bare", stage)) / (m.world_size - 1)
            exposed = m.spent(what, EXPOSED) / (m.world_size - 1)
            times = {name: m.alone(name, stage) for name in m.seconds}
            limit = f"{m.slowness:.1f}", f"{(m.bytes_per_second or 0) / 1e6:.0f}"
            result.add_row(
                *(str(m.world_size), what, *(limit if m.slowness else "--")),
                *(f"{1e3 * x:.1f}" for x in (m.spent(what, COMPUTE) / m.world_size, hop, exposed)),
                f"{exposed / hop:.3f}",
                *(f"{1e3 * median(times[name]):.0f}" for name in ("ring", "bare", "gather")),
                *(f"{median_ratio(times['ring'], times[name]):.3f}" for name in ("bare", "gather")),
            )
    return result


def draw(measurements: list[Measurement], path: Path) -> None:
    """The time line of each rank, forward, where transfers are hidden and where they are not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [m for m in measurements if m.slowness and m.world_size == measurements[-1].world_size]
    figure, panels = pyplot.subplots(len(shown), 1, figsize=(8, 2 * len(shown)), squeeze=False)
    colors = {"tile": "tab:blue", "merge": "tab:green", "send": "tab:orange", "wait": "tab:red"}
    for panel, m in zip(panels[:, 0], shown, strict=True):
        for what, color in colors.items():
            for rank, spans in enumerate(m.spans[-1]):
                of_kind = [x for x in spans if (x.ring, x.what) == ("forward", what)]
                bars = [(1e3 * x.start, 1e3 * (x.end - x.start)) for x in of_kind]
                panel.broken_barh(
                    bars, (rank - 0.4, 0.8), color=color, label=None if rank else what
                )
        panel.set(
            title=f"a hop takes {m.slowness:.1f} of what a step computes",
            xlabel="ms",
            yticks=range(m.world_size),
            ylabel="rank",
        )
        panel.invert_yaxis()
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        f"\nCausal, zigzag, float32, batch 1, {NUM_HEADS} heads of {HEAD_DIM}, gloo. The limit is "
        "what a hop takes of what a step\ncomputes, forward. Then milliseconds: what a step "
        "computes; a hop alone (key and value, in backward also\nthe sums of their gradients); "
        "what is exposed of it (sends and waits, the mean of ranks); and as a whole our\nring, "
        "the bare transfers, and PyTorch's ring by all-gather (gradients go by all-to-all there).\n"
    )
    console.print(table(measurements))


def report_eight_bits(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured with keys and values in eight bits, in Markdown."""
    console.print(
        f"\nCausal, zigzag, bfloat16, batch 1, {NUM_HEADS} heads of {HEAD_DIM}, gloo. The limit is "
        "what a hop of bfloat16 takes\nof what a step computes, forward. Then milliseconds: what a "
        "step computes; a bare hop; and as a whole the\nring with keys and values as they are, in "
        "int8 and in e4m3. Backward also sends the sums of their\ngradients, as float32.\n"
    )
    console.print(table_of_eight_bits(measurements))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--eight-bits", action="store_true", help="keys and values in eight bits")
    parser.add_argument("--quick", action="store_true", help="a short sequence, on two hosts")
    parser.add_argument("--hosts", type=int, nargs="+", help="by default 2, and 4 on 4 cores")
    arguments = parser.parse_args()
    quick, cores = arguments.quick, os.cpu_count() or 1
    numbers = arguments.hosts or [number for number in (2, 4) if number <= max(cores, 2)]
    about, measurements = origin(), []
    try:
        for world_size in numbers:
            measure_all = run_eight_bits if arguments.eight_bits else run
            measurements += measure_all(world_size, 2048 if quick else 8192, 2 if quick else 7)
    except RuntimeError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    measured = {"measurements": [asdict(m) for m in measurements]}
    if arguments.eight_bits:
        show = partial(report_eight_bits, measurements=measurements)
        title = "Keys and values in eight bits between hosts"
        publish("hosts_eight_bits", title, quick, about, measured, show)
        return
    show = partial(report, measurements=measurements)
    folder = publish("hosts", "The ring between hosts", quick, about, measured, show)
    draw(measurements, folder / "hosts.png")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1].isdigit():  # started by `Hosts.run`
        work(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    else:
        main()
