"""Measure every strategy, and PyTorch's rings, in turns: which one is fastest where.

Run ``python benchmarks/strategies.py``: it starts 2, 4 and 8 processes itself, prints tables, and
writes them with every single time to ``benchmarks/results``. Run by root, it measures 2 and 4 hosts
on links of three rates, too; hosts are network namespaces of this machine (see network.py). With
``--quick`` it measures a few small cases and writes to ``out`` instead. Ratios are medians of the
ratios of neighbouring times. Leave the machine alone meanwhile.
"""

import os
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from baselines import Stages, median_ratio, time_paired, torch_ring
from harness import (
    HEAD_DIM,
    STAGES,
    is_quick,
    origin,
    publish,
    spawn,
    spawn_on_hosts,
    table_of,
    work_on_host,
)
from network import hosts
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import Mask, SequenceAxis, ring_attention
from dtensor_ring.compute.memory import TOKEN_MAJOR, in_order

ATTENTIONS = {
    "causal": Mask.causal(),
    "window": Mask.sliding(1023),
    "documents": Mask.causal(),
}
DOCUMENT = 1500
"""Tokens of each packed document."""
HEADS = {"grouped": (8, 2), "multi-head": (8, 8)}
RATES = 0, 400, 50
"""Of a host's link, in MB/s; 0 is as fast as it gets."""
TORCH = {"torch all-to-all": "torch ring", "torch all-gather": "torch gather"}
"""PyTorch's two rings, by the words of a table: the one whose keys go around, and its default."""


@dataclass(frozen=True)
class Case:
    """What is measured; `attention` and `heads` are names of tables above."""

    world_size: int
    seq_len: int
    attention: str
    heads: str
    repeats: int
    rate: int | None = None
    """One of `RATES` between hosts; `None` on one machine."""

    @property
    def strategies(self) -> list[str]:
        """All strategies that differ on this number of ranks."""
        sizes = [n for n in range(2, self.world_size) if self.world_size % n == 0]
        return ["ring", "all_gather", *(f"ulysses:{n}" for n in sizes), "ulysses"]

    def cu_seqlens(self) -> Tensor | None:
        """Boundaries of packed documents."""
        if self.attention != "documents":
            return None
        return torch.tensor([*range(0, self.seq_len, DOCUMENT), self.seq_len], dtype=torch.int32)


@dataclass(frozen=True)
class Measurement:
    """Seconds by contender, stage and repeat."""

    case: Case
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)


def cases(quick: bool) -> list[Case]:
    """By ranks, length, mask and heads."""
    sizes, lengths = ((2, 4), {2048: 2}) if quick else ((2, 4, 8), {2048: 5, 8192: 2})
    return [
        Case(size, seq_len, attention, heads, repeats)
        for size in sizes
        for seq_len, repeats in lengths.items()
        for attention in (list(ATTENTIONS)[:2] if quick else ATTENTIONS)
        for heads in (list(HEADS)[1:] if quick else HEADS)
    ]


def host_cases(quick: bool) -> list[Case]:
    """By hosts, rate, mask and heads."""
    return [
        Case(size, 2048 if quick else 4096, attention, heads, 2, rate)
        for size in ((2,) if quick else (2, 4))
        for rate in (RATES[1:2] if quick else RATES)
        for attention in (list(ATTENTIONS)[:1] if quick else ATTENTIONS)
        for heads in HEADS
    ]


def measure_hosts(todo: list[Case]) -> list[Measurement]:
    """In new processes for each number of hosts and rate."""
    measurements: list[Measurement] = []
    for world_size, rate in dict.fromkeys((case.world_size, case.rate) for case in todo):
        now = [case for case in todo if (case.world_size, case.rate) == (world_size, rate)]
        with hosts(world_size) as network:
            network.limit(1e6 * rate if rate else None)
            measurements += of_results(spawn_on_hosts(network, __file__, now))
    return measurements


def of_results(results: list[dict[str, Any]]) -> list[Measurement]:
    """What the processes measured."""
    return [Measurement(Case(**x["case"]), x["seconds"]) for x in results]


def shards_of(heads: tuple[int, int], num_tokens: int, rank: int) -> list[Tensor]:
    """Gradient of the output, query, key and value of this rank's tokens."""
    torch.manual_seed(rank)
    counts = heads[0], heads[0], heads[1], heads[1]
    shapes = [(1, count, num_tokens, HEAD_DIM) for count in counts]
    return [in_order(torch.randn(shape), TOKEN_MAJOR, torch.float32) for shape in shapes]


def ours(
    mask: Mask, cu_seqlens: Tensor | None, strategy: str, mesh: DeviceMesh, shards: list[Tensor]
) -> Stages:
    """Our attention by a strategy, as autograd runs it."""
    grad, *tensors = shards
    inputs = [x.detach().requires_grad_() for x in tensors]
    kept: list[Tensor] = []

    @torch.enable_grad()
    def forward() -> list[Tensor]:
        options = {"mask": mask, "cu_seqlens": cu_seqlens, "strategy": strategy}
        kept[:] = [ring_attention(*inputs, mesh=mesh, **options)]
        return [kept[0].detach()]

    def backward() -> list[Tensor]:
        return list(torch.autograd.grad(kept, inputs, grad))

    return forward, backward


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    group = mesh.get_group()
    SequenceAxis(mesh, "zigzag")
    num_tokens = case.seq_len // case.world_size
    shards = shards_of(HEADS[case.heads], num_tokens, group.rank())
    attention = ATTENTIONS[case.attention], case.cu_seqlens()
    contenders = {name: ours(*attention, name, mesh, shards) for name in case.strategies}
    # PyTorch's rings know causal masks, and as many key heads as query heads, only.
    if case.attention == "causal" and case.heads == "multi-head":
        contenders["torch all-to-all"] = torch_ring(mesh, shards, False)
        contenders["torch all-gather"] = torch_ring(mesh, shards, False, "allgather")
    results = {name: [x for stage in found for x in stage()] for name, found in contenders.items()}
    for found in results.values():  # all do the same work
        torch.testing.assert_close(found, results["ring"], atol=1e-4, rtol=1e-4)
    seconds = time_paired(contenders, case.repeats, lambda: dist.barrier(group))
    return Measurement(case, seconds)


def table(measurements: list[Measurement], stage: int) -> Table:
    """One row for each case: the ring's time, and what others take over it."""
    names = list(dict.fromkeys(name for m in measurements for name in m.seconds))
    texts = ("ranks", "MB/s", "tokens", "attention", "heads", "ring ms")
    result = table_of(texts, [TORCH.get(name, name) for name in names[1:]])
    for m in measurements:
        ring = m.seconds["ring"][stage]
        ratios = {name: median_ratio(times[stage], ring) for name, times in m.seconds.items()}
        fastest = min(m.case.strategies, key=ratios.__getitem__)
        marked = {name: f"{x:.2f}{' *' * (name == fastest)}" for name, x in ratios.items()}
        rate = m.case.rate or ("" if m.case.rate is None else "full")
        of_case = m.case.world_size, rate, f"{m.case.seq_len:,}", m.case.attention, m.case.heads
        milliseconds = f"{1e3 * median(ring):.1f}{' *' * (fastest == 'ring')}"
        result.add_row(
            *map(str, of_case), milliseconds, *(marked.get(name, "") for name in names[1:])
        )
    return result


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    heads = ", ".join(f"{name}: {n} query and {k} key heads" for name, (n, k) in HEADS.items())
    console.print(
        f"\nZigzag, batch 1, head dim {HEAD_DIM}, float32, gloo, a thread a rank. {heads}.\n"
        f"Windows of 1,024 tokens, documents of {DOCUMENT:,}. The median of our ring's times on "
        "the slowest rank,\nand what others take over it; * is the fastest of ours. MB/s is the "
        "rate of a host's link, full: not limited;\nwithout it, ranks are processes of one "
        "machine. torch ring passes keys around, torch gather, its default, gathers them.\n"
    )
    for stage, what in enumerate(STAGES):
        console.print(f"## {what.capitalize()}\n")
        console.print(table(measurements, stage))


def main() -> None:
    quick = is_quick(__doc__)
    about, measurements = origin(), []
    for world_size in sorted({case.world_size for case in cases(quick)}):
        todo = [case for case in cases(quick) if case.world_size == world_size]
        measurements += of_results(spawn(world_size, measure, todo))
    if os.geteuid() == 0:
        measurements += measure_hosts(host_cases(quick))
    measured = {"measurements": [asdict(m) for m in measurements]}
    show = partial(report, measurements=measurements)
    publish("strategies", "Strategies on CPUs", quick, about, measured, show)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1].isdigit():  # started by `Hosts.run`
        work_on_host(measure, Case, *sys.argv[1:])
    else:
        main()
