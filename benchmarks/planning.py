"""What it costs the host to plan a ring: seconds of one rank, one core, and bytes of the caches.

    python benchmarks/planning.py

One process, no tensors: every number of ranks is planned from here. With ``--quick`` it takes
seconds and writes to ``out``.
"""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter, process_time

import numpy as np
import torch
import torch.distributed as dist
from harness import is_quick, origin, publish, table_of
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_ring import (
    Balanced,
    BlockCyclic,
    Contiguous,
    Mask,
    Striped,
    TransferPolicy,
    ZigZag,
    describe_schedule,
)
from dtensor_ring.balanced import balanced
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.lab.choose import choose, chosen_strategy
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.problem import SimulatedProblem, problem_of
from dtensor_ring.lab.simulated_attention import timeline_of
from dtensor_ring.ops import options
from dtensor_ring.ops.options import Batch, Place
from dtensor_ring.planning import plan as planner
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Documents, as_documents
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.planning.run_table import shard_table
from dtensor_ring.planning.slices import slices_of
from dtensor_ring.planning.strategy import Strategy

SEQ_LEN = 2**24
CACHES = {
    "plans": plan,
    "needs": planner._demand,
    "runs": shard_table,
    "slices": slices_of,
    "balanced": balanced._balanced_runs,
}
CAUSAL = Mask.causal()


@dataclass(frozen=True)
class Case:
    """A first plan; `documents` counts those of the sequence, 0 for a sequence in one piece."""

    layout: Layout
    mask: Mask
    world_size: int
    seq_len: int = SEQ_LEN
    documents: int = 0
    aim: float | None = None


@dataclass(frozen=True)
class Cost:
    """Seconds of one rank, by the clock and on the processor, and bytes kept by each cache."""

    name: str
    world_size: int
    seq_len: int
    wall: float
    cpu: float
    known: float
    num_steps: int
    num_tiles: int
    num_bytes: dict[str, int]
    aim: float | None = None


@dataclass(frozen=True)
class Call:
    """Microseconds."""

    name: str
    time: float


def boundaries(num_documents: int, seq_len: int) -> np.ndarray:
    """Boundaries of documents of lognormal lengths that fill the sequence; always the same."""
    generator = np.random.default_rng(0)
    lengths = np.exp(np.log(700) + 1.5 * generator.standard_normal(num_documents))
    ends = np.round(np.cumsum(lengths) / lengths.sum() * seq_len)
    return np.append(0, ends).astype(np.int32)


def cases(quick: bool) -> list[Case]:
    """The aims first."""
    aims = [(64, 0.05), (1024, 0.5)] if quick else [(64, 0.05), (1024, 0.5), (10000, 5.0)]
    todo = [Case(ZigZag(), CAUSAL, world_size, aim=aim) for world_size, aim in aims]
    todo.append(Case(ZigZag(), CAUSAL, 1024, documents=10000, aim=1.0))
    todo += [
        Case(layout, mask, world_size)
        for world_size in ((64,) if quick else (64, 1024))
        for layout, mask in (
            (Contiguous(), CAUSAL),
            (ZigZag(), Mask.full()),
            (ZigZag(), Mask.sliding(4096)),
            (ZigZag(), Mask.sliding(SEQ_LEN // 4)),
            (ZigZag(), Mask.prefix_causal(1024)),
            (ZigZag(), Mask.chunked(8192)),
            (Striped(), CAUSAL),
        )
    ]
    todo.append(Case(Contiguous(), CAUSAL, 64, documents=10000))
    todo.append(Case(BlockCyclic(1024), CAUSAL, 64, 2**20))
    if not quick:
        todo.append(Case(Contiguous(), CAUSAL, 1024, documents=100000))
        todo.append(Case(ZigZag(), CAUSAL, 10000, documents=10000))
        todo.append(Case(Striped(), CAUSAL, 32, 2**20, documents=500))
    return todo


def clear() -> None:
    for cache in CACHES.values():
        cache.clear()


def measure(case: Case, repeats: int) -> Cost:
    """Medians of first plans; `known` is the same plan asked for again."""
    documents = None
    if case.documents:
        documents = as_documents(boundaries(case.documents, case.seq_len))
    sizes = case.world_size // 3, case.world_size, case.seq_len
    wall, cpu = [], []
    for _ in range(repeats):
        clear()
        gc.collect()
        begin = perf_counter(), process_time()
        found = plan(case.layout, case.mask, *sizes, documents)
        wall.append(perf_counter() - begin[0])
        cpu.append(process_time() - begin[1])
    begin = perf_counter()
    for _ in range(1000):
        plan(case.layout, case.mask, *sizes, documents)
    known = (perf_counter() - begin) / 1000
    bounds = {name: getattr(case.mask, name) for name in ("left", "right", "chunk", "prefix")}
    shown = " ".join(f"{name} {n}" for name, n in bounds.items() if n is not None) or "full"
    name = f"{case.layout.spec}, {shown}" + f", {case.documents:,} documents" * bool(documents)
    return Cost(
        *(name, case.world_size, case.seq_len, median(wall), median(cpu), known),
        *(found.num_steps, sum(len(step.tiles) for step in found.steps)),
        {name: cache.num_bytes for name, cache in CACHES.items()},
        case.aim,
    )


def timed(call: Callable[[], object], seconds: float) -> float:
    """Microseconds, the median of many rounds."""
    times, end = [], perf_counter() + seconds
    while perf_counter() < end or len(times) < 3:
        begin = perf_counter()
        call()
        times.append(1e6 * (perf_counter() - begin))
    return median(times)


def measure_calls(seconds: float) -> list[Call]:
    """Costs of converting boundaries and of printing."""
    found = []
    for seq_len, count in ((2**13, 8), (2**20, 500), (2**20, 10000)):
        ends = torch.from_numpy(boundaries(count, seq_len))
        padded = torch.full((seq_len + 1,), seq_len, dtype=torch.int32)
        padded[: len(ends)] = ends
        what = f"{count:,} documents of {seq_len:,} tokens"
        for form, given in (("", ends), (", padded to (S+1,)", padded)):
            convert = partial(as_documents, given)
            found.append(Call(f"as_documents: {what}{form}", timed(convert, seconds)))
    for world_size in (8, 32):
        arguments = "zigzag", CAUSAL, 2**20, world_size

        def describe(arguments: tuple = arguments) -> object:
            clear()
            return describe_schedule(*arguments)

        def show(arguments: tuple = arguments) -> str:
            return str(describe(arguments))

        found.append(Call(f"describe_schedule: {world_size} ranks", timed(describe, seconds)))
        found.append(Call(f"the same, printed: {world_size} ranks", timed(show, seconds)))
    return found


def measure_simulations(quick: bool, seconds: float) -> list[Call]:
    """Forward and backward of an attention on a machine, planning included, and a known choice."""
    machine, found = as_machine("h100"), []
    world_size = 64 if quick else 1024
    for mask in (CAUSAL, Mask.sliding(4096)):
        asked = mask, 4096 * world_size, world_size

        def simulate(asked: tuple = asked) -> float:
            clear()
            return timeline_of(simulated(*asked), Strategy(), machine).total

        what = "causal" if mask == CAUSAL else "window of 4,096"
        name = f"simulated forward and backward: {world_size:,} ranks, zigzag, {what}"
        found.append(Call(name, timed(simulate, seconds)))
    return found + measure_choices(seconds)


def measure_choices(seconds: float) -> list[Call]:
    """The first choice of a strategy on 8 ranks, from nothing, and a known one."""
    machine, found = as_machine("h100"), []
    known = partial(choose, CAUSAL, 2**16, 8, machine=machine)

    def first(mask: Mask) -> Strategy:
        clear()
        chosen_strategy.clear()
        return choose(mask, 2**16, 8, machine=machine)

    for mask, what in ((CAUSAL, "causal"), (Mask.sliding(4096), "window of 4,096")):
        found.append(Call(f"choose: 8 ranks, {what}", timed(partial(first, mask), seconds)))
    known()
    return [*found, Call("choose: 8 ranks, asked before", timed(known, seconds))]


def simulated(mask: Mask, seq_len: int, world_size: int) -> SimulatedProblem:
    """An attention of 32 query heads and 8 key heads."""
    options = {"slices": None, "layout": "zigzag", "batch": 1, "dtype": torch.bfloat16}
    sizes = (32, 8), 128, None
    return problem_of(mask, seq_len, world_size, *sizes, policy=TransferPolicy(), **options)


def known_plan(call: options.Call, shard: torch.Tensor) -> Plan:
    """As the op asks for it."""
    return call.request(len(shard)).plan(shard, shard)


def measure_known(seconds: float) -> list[Call]:
    """What a call does with boundaries that it knows: find, compare, and look its plan up.

    Of rank 0 of 8, in turns; all else that a call costs the host does not depend on them.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    name, todo = dist.group.WORLD.group_name, {}
    for seq_len, count in ((2**13, 8), (2**20, 8), (2**20, 500), (2**20, 10000)):
        ends = torch.from_numpy(boundaries(count, seq_len))
        padded = torch.full((seq_len + 1,), seq_len, dtype=torch.int32)
        padded[: len(ends)] = ends
        shard = torch.empty(1, 1, seq_len // 8, 8, device="meta")
        for form, given in (("", ends), (", padded to (S+1,)", padded)):
            place = Place("zigzag", "ring", seq_len, seq_len, name)
            call = options.Call(Batch(given), Scores(CAUSAL, 1.0), place)
            what = f"known: {count:,} documents of {seq_len:,} tokens{form}"
            todo[what] = partial(known_plan, call, shard)
    times: dict[str, list[float]] = {what: [] for what in todo}
    for _ in range(10):
        for what, find in todo.items():
            times[what].append(timed(find, seconds / 10))
    dist.destroy_process_group()
    return [Call(what, median(found)) for what, found in times.items()]


def measure_peak() -> dict[str, int]:
    """Bytes of each cache after many plans of different batches, of 64 ranks each."""
    clear()
    for number in range(64):
        ends = boundaries(10000, SEQ_LEN)
        ends[1] = 1 + number
        documents = Documents([np.unique(ends)])
        for rank in range(0, 64, 8):
            plan(ZigZag(), CAUSAL, rank, 64, SEQ_LEN, documents)
    plan(Balanced(CAUSAL, 2**16, 8), CAUSAL, 0, 8, 2**16)
    return {name: cache.num_bytes for name, cache in CACHES.items()}


def report(console: Console, costs: list[Cost], calls: list[Call], peak: dict[str, int]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        "\nThe first plan of one rank, medians: seconds by the clock and of the processor, and "
        "microseconds of asking\nfor it again; the plan, and MB that all caches keep then.\n"
    )
    numbers = ("ranks", "tokens", "aim, s", "s", "CPU s", "again, us", "steps", "tiles", "MB")
    table = table_of(("layout and mask",), numbers)
    for cost in costs:
        table.add_row(
            *(cost.name, f"{cost.world_size:,}", f"{cost.seq_len:,}"),
            "" if cost.aim is None else f"{cost.aim:g}",
            *(f"{cost.wall:.4f}", f"{cost.cpu:.4f}", f"{1e6 * cost.known:.1f}"),
            *(f"{cost.num_steps:,}", f"{cost.num_tiles:,}"),
            f"{sum(cost.num_bytes.values()) / 2**20:.2f}",
        )
    console.print(table)
    console.print(
        "\nCalls, medians. A schedule plans all ranks, from nothing. `known` is what a call of the "
        "op spends on\nboundaries that it has seen before, its plan included.\n"
    )
    table = table_of(("call",), ("us",))
    for call in calls:
        table.add_row(call.name, f"{call.time:,.0f}")
    console.print(table)
    console.print(
        "\nCaches after 64 batches of 10,000 documents each, 8 of 64 ranks each: MB kept, and the "
        "bound.\n"
    )
    table = table_of(("cache",), ("MB", "bound, MB"))
    for name, kept in peak.items():
        table.add_row(name, f"{kept / 2**20:.1f}", f"{CACHES[name].max_bytes / 2**20:.0f}")
    console.print(table)


def main() -> None:
    quick = is_quick(__doc__, "take seconds")
    torch.set_num_threads(1)
    about = origin()
    measure(Case(ZigZag(), CAUSAL, 4), 1)  # numpy's first use
    costs = [measure(case, 1 if quick else 5) for case in cases(quick)]
    seconds = 0.05 if quick else 1
    calls = measure_calls(seconds) + measure_known(seconds)
    calls += measure_simulations(quick, seconds)
    peak = measure_peak()
    clear()
    measured = {
        "costs": [asdict(cost) for cost in costs],
        "calls": [asdict(call) for call in calls],
        "peak": peak,
    }
    show = partial(report, costs=costs, calls=calls, peak=peak)
    publish("planning", "Planning", quick, about, measured, show)


if __name__ == "__main__":
    main()
