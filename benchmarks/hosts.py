"""The ring between hosts, on links of limited rate: what of the transfers is exposed.

    sudo python benchmarks/hosts.py

Hosts are network namespaces of this machine (see network.py), with one process of one thread each.
Three links: as fast as they get, one that moves a shard in four fifths of the time that a step
computes, and one on which that takes many times as long. With ``--quick`` the sequence is short and
the results go to ``out``.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from baselines import median_ratio, time_paired, torch_ring, transfers, zigzag_shard
from harness import HEAD_DIM, NUM_HEADS, STAGES, op_stages, origin, publish
from network import Hosts, hosts
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from dtensor_ring.op import Options, default_scale
from dtensor_ring.order import TOKEN_MAJOR, in_order

FAST, HIDDEN, SLOW = "unlimited", "transfer = 0.8 compute", "transfer = 15 compute"
HIDDEN, SLOW = 0.8, 15
COMPUTE, EXPOSED = ("tile", "merge"), ("wait", "wait for sums")
PORT = 29512


@dataclass(frozen=True)
class Case:
    """What the processes measure."""

    world_size: int
    seq_len: int
    repeats: int
    address: str


@dataclass(frozen=True)
class Span:
    """Something that a step did, in seconds from the beginning."""

    ring: str
    step: int
    what: str
    start: float
    end: float


@dataclass(frozen=True)
class Measurement:
    """Seconds by contender, stage and repeat; and the spans of each rank's steps, of one repeat."""

    world_size: int
    slowness: float
    """Of a hop alone over what a step computes, forward, to which the link was limited; 0: not."""
    bytes_per_second: float | None
    seconds: dict[str, list[list[float]]]
    spans: list[list[Span]] = field(default_factory=list)

    def step(self, ring: str, kinds: tuple[str, ...], step: int) -> float:
        """Seconds that a step spends on these, on the rank where it is most."""
        return max(
            sum(
                x.end - x.start
                for x in spans
                if (x.ring, x.step) == (ring, step) and x.what in kinds
            )
            for spans in self.spans
        )

    def transfer(self, stage: int) -> float:
        """Seconds of a hop alone: key and value, or those and the sums of their gradients."""
        both = self.seconds["transfers"]
        alone = [x - y for x, y in zip(both[1], both[0], strict=True)] if stage else both[0]
        return median(alone) / (self.world_size - 1)


def work(rank: int, folder: Path) -> None:
    """What runs on a host."""
    case = Case(**json.loads((folder / "case.json").read_text()))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{case.address}:{PORT}",
        rank=rank,
        world_size=case.world_size,
    )
    mesh = init_device_mesh("cpu", (case.world_size,))
    torch.manual_seed(0)
    whole = [torch.randn(1, NUM_HEADS, case.seq_len, HEAD_DIM) for _ in range(4)]
    shards = [zigzag_shard(x, 2, rank, case.world_size) for x in whole]
    shards = [in_order(x, TOKEN_MAJOR, x.dtype) for x in shards]
    length = {"seq_len": case.seq_len, "key_seq_len": case.seq_len, "layout": "zigzag", "right": 0}
    scale, group = default_scale(HEAD_DIM), mesh.get_group()
    ours = op_stages(shards, Options(**length, scale=scale, group_name=group.group_name))
    contenders = {
        "ours": ours,
        "all-gather": torch_ring(mesh, shards, stub=False, rotation="allgather"),
        "transfers": transfers(group, *shards[2:]),
    }
    with torch.no_grad():
        seconds = time_paired(contenders, case.repeats, lambda: dist.barrier(group))
        dist.barrier(group)
        spans = spans_of(ours)
    found = {"seconds": seconds, "spans": [asdict(span) for span in spans]}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier(group)
    dist.destroy_process_group()


def spans_of(stages: Any) -> list[Span]:
    """What the labels of the ring say in a profile of one call of each stage."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for stage in stages:
            stage()
    spans, first = [], min(event.time_range.start for event in profiler.events())
    for event in profiler.events():
        if event.name.startswith("ring "):
            place, what = event.name.split(": ")
            ring, step, _ = place.removeprefix("ring ").split(", ")
            times = ((x - first) / 1e6 for x in (event.time_range.start, event.time_range.end))
            spans.append(Span(ring, int(step.removeprefix("step ")), what, *times))
    return spans


def measure(network: Hosts, case: Case, compute: float, slowness: float) -> Measurement:
    """On links on which a hop takes so much of the seconds that a step computes."""
    message = 2 * NUM_HEADS * HEAD_DIM * 4 * case.seq_len / case.world_size
    rate = message / (slowness * compute) if slowness else None
    network.limit(rate)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(asdict(case)))
        network.run(Path(__file__).resolve(), name)
        found = [
            json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(case.world_size)
        ]
    spans = [[Span(**span) for span in rank["spans"]] for rank in found]
    return Measurement(case.world_size, slowness, rate, found[0]["seconds"], spans)


def run(world_size: int, seq_len: int, repeats: int) -> list[Measurement]:
    """On a fast link first, which says how long a step computes."""
    with hosts(world_size) as network:
        case = Case(world_size, seq_len, repeats, network.address(0))
        fast = measure(network, case, 0, 0)
        compute = min(fast.step("forward", COMPUTE, step) for step in range(world_size))
        hidden = measure(network, case, compute, HIDDEN)
        slow = measure(network, replace(case, repeats=2), compute, SLOW / (world_size - 1))
        return [fast, hidden, slow]


def table(measurements: list[Measurement]) -> Table:
    result = Table("hosts", "link", "what", box=MARKDOWN)
    headings = ("MB/s", "step computes ms", "hop alone ms", "exposed a hop ms", "exposed/hop")
    headings += ("ours ms", "transfers ms", "all-gather ms", "ours/transfers", "ours/all-gather")
    for heading in headings:
        result.add_column(heading, justify="right")
    for m in measurements:
        hops = range(m.world_size - 1)
        for stage, (what, ring) in enumerate(zip(STAGES, ("forward", "backward"), strict=True)):
            compute = median(m.step(ring, COMPUTE, step) for step in hops)
            exposed = sum(m.step(ring, EXPOSED, step) for step in range(m.world_size + 1))
            exposed, alone = exposed / len(hops), m.transfer(stage)
            times = {name: seconds[stage] for name, seconds in m.seconds.items()}
            result.add_row(
                *(str(m.world_size), f"{m.slowness:.1f}" if m.slowness else "-", what),
                f"{m.bytes_per_second / 1e6:.0f}" if m.bytes_per_second else "-",
                *(f"{1e3 * x:.1f}" for x in (compute, alone, exposed)),
                f"{exposed / alone:.3f}",
                *(f"{1e3 * median(times[x]):.0f}" for x in ("ours", "transfers", "all-gather")),
                *(
                    f"{median_ratio(times['ours'], times[x]):.3f}"
                    for x in ("transfers", "all-gather")
                ),
            )
    return result


def draw(measurements: list[Measurement], path: Path) -> None:
    """The time line of each rank, forward, where transfers are hidden and where they are not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [m for m in measurements if m.slowness and m.world_size == measurements[-1].world_size]
    figure, panels = pyplot.subplots(len(shown), 1, figsize=(8, 2 * len(shown)), squeeze=False)
    colors = {"tile": "tab:blue", "merge": "tab:green", "wait": "tab:red"}
    for panel, m in zip(panels[:, 0], shown, strict=True):
        for what, color in colors.items():
            for rank, spans in enumerate(m.spans):
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
        panel.legend(loc="upper right", ncols=3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def report(console: Console, about: dict[str, str], measurements: list[Measurement]) -> None:
    """Print the table, in Markdown."""
    console.print("# The ring between hosts\n")
    for what, text in about.items():
        console.print(f"- {what}: {text}", highlight=False)
    console.print(
        f"\nCausal, zigzag, float32, batch 1, {NUM_HEADS} heads of {HEAD_DIM}, gloo. A hop moves "
        "key and value;\nwith backward also, in float32, the sums of their gradients.\n"
    )
    console.print(table(measurements))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short sequence, on two hosts")
    quick = parser.parse_args().quick
    about, measurements = origin(), []
    for world_size in (2,) if quick else (2, 4):
        measurements += run(world_size, 2048 if quick else 8192, 2 if quick else 7)
    record = {"about": about, "measurements": [asdict(m) for m in measurements]}
    folder = publish(
        "hosts-cpu", quick, record, lambda console: report(console, about, measurements)
    )
    draw(measurements, folder / "hosts-cpu.png")


if __name__ == "__main__":
    if len(sys.argv) == 3:  # started by `Hosts.run`
        work(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
