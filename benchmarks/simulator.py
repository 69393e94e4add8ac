"""Compare attentions with what the simulator says of them, from one calibration of each place.

Run ``sudo python benchmarks/simulator.py``: it calibrates 2 and 4 ranks on this machine, and 2 and
4 hosts on links of three rates, where hosts are network namespaces of this machine (see
network.py). Then it measures attentions that no calibration saw, by every strategy in turns, and
compares each time with the simulated one, and each choice with the fastest. The tables go to
``benchmarks/results``, with every single time and all machine files. Not run by root, it does
without hosts. With ``--quick`` it measures a few small cases and writes to ``out`` instead;
``--again FILE`` simulates again what a file has. Leave the machine alone meanwhile.

Where ranks outnumber cores, the kernel waits instead of computing, see paced.py.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import paced
import torch
from harness import HEAD_DIM, origin, publish, spawn, spawn_on_hosts, table_of, work_on_host
from network import hosts
from rich.console import Console
from rich.table import Table
from strategies import HEADS, RATES, ours, shards_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring import Mask, SequenceAxis, compare_strategies
from dtensor_ring.lab.calibrate.calibrate_kernels import CalibratedProblem
from dtensor_ring.lab.calibrate.calibrate_machine import BETWEEN, INSIDE, measure_machine
from dtensor_ring.lab.calibrate.stopwatch import FULL_EFFORT, QUICK_EFFORT, Stopwatch
from dtensor_ring.lab.choose import choose
from dtensor_ring.lab.comparison import StrategyCost
from dtensor_ring.lab.machine import Machine
from dtensor_ring.lab.simulated_attention import simulate_attention
from dtensor_ring.planning.strategy import as_strategy

ATTENTIONS = {
    "causal": Mask.causal(),
    "window": Mask.sliding(1023),
    "documents": Mask.causal(),
    "full": Mask.full(),
}
SEQ_LENS = {"causal": 4096, "window": 8192, "documents": 8192, "full": 4096}
"""Tokens; all attentions take tenths of a second, beside which the checks of a call are little."""
KEEP = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""Lets glibc keep freed memory, as allocators of GPUs do. Else page faults, which depend on all
that a process did before, take up to a third of a short attention."""
LENGTHS = 0.24, 0.27, 0.235, 0.255
"""Of the documents, as parts of the sequence."""
CALIBRATED_HEADS = 8, 4
"""Of queries and keys, unlike any case's."""
STAGES = "forward", "with backward"
CLOSE = 0.05
"""The largest regret of a choice that counts as right."""


@dataclass(frozen=True)
class Case:
    """What is measured; `attention` and `heads` are names of tables, without them a calibration."""

    world_size: int
    seq_len: int
    repeats: int
    rate: int | None = None
    """Of a host's link, in MB/s, 0 is as fast as it gets; `None` on one machine."""
    attention: str = ""
    heads: str = ""
    quick: bool = False

    @property
    def place(self) -> tuple[int, int | None]:
        """Cases of one place share a calibration."""
        return self.world_size, self.rate

    @property
    def kernel(self) -> str | None:
        """The name of the kernel: the usual one where each rank has a core."""
        return None if self.world_size <= (os.cpu_count() or 1) else paced.PacedKernel.name

    @property
    def strategies(self) -> list[str]:
        """The strategies that differ; with few ranks, some are the same messages."""
        asked = {name: x for name, x in self.problem.items() if name != "dtype"}
        known: dict[StrategyCost, str] = {}
        for row in compare_strategies(**asked).rows:
            known.setdefault(replace(row, strategy=""), row.strategy)
        return list(known.values())

    @property
    def problem(self) -> dict[str, Any]:
        """What the simulation is told."""
        asked = {"mask": ATTENTIONS[self.attention], "seq_len": self.seq_len}
        asked |= {"world_size": self.world_size, "heads": HEADS[self.heads], "head_dim": HEAD_DIM}
        return asked | {"cu_seqlens": self.cu_seqlens(), "dtype": "float32"}

    def cu_seqlens(self) -> Tensor | None:
        """Boundaries of packed documents."""
        if self.attention != "documents":
            return None
        ends = torch.tensor(LENGTHS).cumsum(0) * self.seq_len
        return torch.tensor([0, *ends.round().int().tolist()], dtype=torch.int32)


@dataclass(frozen=True)
class Measurement:
    """Seconds by strategy, direction and repeat; of a calibration the machine instead."""

    case: Case
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    machine: str = ""


@dataclass(frozen=True)
class Row:
    """A measured and a simulated time, in seconds."""

    case: Case
    strategy: str
    stage: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


@dataclass(frozen=True)
class Choice:
    """Seconds of a case by strategy, with backward, and the strategy that was chosen."""

    case: Case
    measured: dict[str, float]
    chosen: str

    def regret(self, strategy: str | None = None) -> float:
        """What a strategy, by default the chosen one, takes over the fastest, less one."""
        spec = as_strategy(strategy, self.case.world_size).spec if strategy else self.chosen
        # What was not measured sends the messages of the ring.
        return self.measured.get(spec, self.measured["ring"]) / min(self.measured.values()) - 1


def cases(quick: bool) -> list[Case]:
    """A calibration of each place, and then its cases."""
    rates = (None, *(RATES if os.geteuid() == 0 else ()))
    places = [(2, None)] if quick else [(size, rate) for size in (2, 4) for rate in rates]
    settings = {"repeats": 1 if quick else 3, "quick": quick}
    return [
        case
        for world_size, rate in places
        for case in (
            Case(world_size, 0, **settings, rate=rate),
            *(
                Case(
                    world_size,
                    1024 if quick else SEQ_LENS[attention],
                    **settings,
                    rate=rate,
                    attention=attention,
                    heads=heads,
                )
                for attention in (list(ATTENTIONS)[:1] if quick else ATTENTIONS)
                for heads in HEADS
            ),
        )
    ]


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    """Time a case by all strategies in turns, or calibrate."""
    paced.register()
    watch = Stopwatch(torch.device("cpu"), QUICK_EFFORT if case.quick else FULL_EFFORT)
    if not case.attention:
        return Measurement(case, machine=calibrated(case, watch).to_json())
    SequenceAxis(mesh, "zigzag", kernel=case.kernel)
    asked = ATTENTIONS[case.attention], case.cu_seqlens()
    num_tokens = case.seq_len // case.world_size
    shards = shards_of(HEADS[case.heads], num_tokens, mesh.get_local_rank())
    contenders = {name: ours(*asked, name, mesh, shards) for name in case.strategies}
    seconds = {name: [[] for _ in STAGES] for name in contenders}
    for repeat in range(-1, case.repeats):  # the first warms up
        for name, stages in contenders.items():
            # One by one, as simulated: else a rank that is done early begins its backward early.
            for times, stage in zip(seconds[name], stages, strict=True):
                times += watch.laps(stage) * (repeat >= 0)
    return Measurement(case, seconds)


def calibrated(case: Case, watch: Stopwatch) -> Machine:
    """Calibrate a place: all ranks on one host, or one rank on each host."""
    shape = (1, case.world_size) if case.rate is None else (case.world_size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=(BETWEEN, INSIDE))
    problem = CalibratedProblem(CALIBRATED_HEADS, HEAD_DIM, torch.float32, case.kernel)
    return measure_machine(name_of(case), watch, mesh, problem)


def name_of(case: Case) -> str:
    """The name of a place."""
    if case.rate is None:
        return f"{case.world_size} ranks"
    return f"{case.world_size} hosts, {f'{case.rate} MB/s' if case.rate else 'full'}"


def measure_places(todo: list[Case]) -> Iterator[Measurement]:
    """Measure the cases of each place in new processes, which calibrate it first."""
    for place in dict.fromkeys(case.place for case in todo):
        world_size, rate = place
        now = [case for case in todo if case.place == place]
        if rate is None:
            found = spawn(world_size, measure, now)
        else:
            with hosts(world_size) as network:
                network.limit(1e6 * rate if rate else None)
                found = spawn_on_hosts(network, __file__, now)
        yield from of_results(found)


def of_results(results: list[dict[str, Any]]) -> list[Measurement]:
    """What the processes measured."""
    return [Measurement(**(x | {"case": Case(**x["case"])})) for x in results]


def simulated(measurements: list[Measurement]) -> tuple[list[Row], list[Choice]]:
    """Simulate all cases, and choose for each."""
    paced.register()  # whether it takes segments is looked up
    files = {x.case.place: Machine.from_json(x.machine) for x in measurements if x.machine}
    rows, choices = [], []
    for case, seconds, _ in ((m.case, m.seconds, m.machine) for m in measurements if not m.machine):
        machine = files[case.place]
        medians = {
            name: (median(ahead), median(x + y for x, y in zip(ahead, back, strict=True)))
            for name, (ahead, back) in seconds.items()
        }
        for strategy, times in medians.items():
            found = simulate_attention(**case.problem, strategy=strategy, machine=machine)
            totals = found.seconds[0], found.total
            rows += [Row(case, strategy, *x) for x in zip(STAGES, times, totals, strict=True)]
        chosen = choose(**case.problem, machine=machine).spec
        choices.append(Choice(case, {name: x[1] for name, x in medians.items()}, chosen))
    return rows, choices


def place_table(rows: list[Row], choices: list[Choice]) -> Table:
    """One row for each place: how far the simulation is off, and what choices cost."""
    result = table_of(("place",), ("times", "median", "worst", "right", "regret", "worst regret"))
    for name in ("all", *dict.fromkeys(name_of(row.case) for row in rows)):
        errors = [abs(row.error) for row in rows if name in ("all", name_of(row.case))]
        regrets = [x.regret() for x in choices if name in ("all", name_of(x.case))]
        right = sum(x <= CLOSE for x in regrets)
        figures = median(errors), max(errors), median(regrets), max(regrets)
        texts = [f"{x:.1%}" for x in figures]
        result.add_row(name, str(len(errors)), *texts[:2], f"{right} of {len(regrets)}", *texts[2:])
    return result


def rule_table(choices: list[Choice]) -> Table:
    """One row for each way to choose: how often it is close to the fastest, and what it costs."""
    result = table_of(("strategy",), (f"within {CLOSE:.0%}", "median", "mean", "worst"))
    for name in ("auto", "ring", "all_gather", "ulysses"):
        regrets = [x.regret(None if name == "auto" else name) for x in choices]
        figures = median(regrets), sum(regrets) / len(regrets), max(regrets)
        close = sum(x <= CLOSE for x in regrets) / len(regrets)
        result.add_row(name, f"{close:.0%}", *(f"{x:.1%}" for x in figures))
    return result


def case_table(rows: list[Row], choices: list[Choice]) -> Table:
    """One row for each case and strategy."""
    texts = "place", "attention", "heads", "strategy"
    headings = [x for stage in STAGES for x in (f"{stage} ms", "simulated", "off")]
    result = table_of(texts, headings)
    chosen = {x.case: x.chosen for x in choices}
    best = {x.case: min(x.measured, key=x.measured.__getitem__) for x in choices}
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        case, strategy = first.case, first.strategy
        marks = " *" * (strategy == best[case]) + " auto" * (strategy == chosen[case])
        times = ((1e3 * row.measured, 1e3 * row.simulated, row.error) for row in (first, second))
        cells = [x for a, b, off in times for x in (f"{a:.1f}", f"{b:.1f}", f"{off:+.1%}")]
        result.add_row(name_of(case), case.attention, case.heads, strategy + marks, *cells)
    return result


def report(console: Console, rows: list[Row], choices: list[Choice]) -> None:
    """Print what was measured and simulated, in Markdown."""
    console.print(
        f"\nZigzag, batch 1, head dim {HEAD_DIM}, float32, gloo, a thread a rank; windows of 1,024 "
        "tokens, four documents.\nTimes are medians of the slowest rank's; each place was "
        "calibrated once before. Off is the simulated time over the measured one,\nless one. Right "
        f"are choices within {CLOSE:.0%} of the fastest strategy, regret is what the choice takes "
        "over it, forward and backward.\n"
    )
    console.print(place_table(rows, choices))
    console.print("\n## Beside fixed strategies\n")
    console.print(rule_table(choices))
    console.print("\n## All cases\n\n* is the fastest, auto the choice.\n")
    console.print(case_table(rows, choices))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few small cases, in a minute")
    parser.add_argument("--again", type=Path, help="simulate what this JSON file has")
    options = parser.parse_args()
    if options.again:
        kept = json.loads(options.again.read_text())
        about, measurements = kept["about"], of_results(kept["measurements"])
    else:
        os.environ |= KEEP  # processes that are started read it
        about = origin()
        measurements = list(measure_places(cases(options.quick)))
    rows, choices = simulated(measurements)
    show = partial(report, rows=rows, choices=choices)
    measured = {"measurements": [asdict(m) for m in measurements]}
    folder = options.again.parent if options.again else None
    publish("simulator", "Simulated and measured", options.quick, about, measured, show, folder)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1].isdigit():  # started by `Hosts.run`
        work_on_host(measure, Case, *sys.argv[1:])
    else:
        main()
