"""Random calls for minutes or hours, with failures in between: nothing may be wrong, or grow.

    make soak ARGS="--minutes 60"

Each round is a world of two or three ranks: calls of all kinds, forward and backward, then a
failure, so that the next round is a new world. One in a hundred calls is compared with dense
attention in float64. Memory, descriptors and threads of the two processes that no failure ends are
counted now and then; it exits with 1 if any of them grows, or anything is wrong.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from time import monotonic

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import Balanced, Mask
from dtensor_ring.dtensor.annotation import annotation_of
from tests.dense import largest
from tests.drawn import cases, different
from tests.faults.breaking import at_launch, break_kernel, kill, patience
from tests.faults.calls import Call, configure, plain, step
from tests.faults.differences import DIFFERENCES
from tests.faults.worlds import Fate, Log, Terms, Worlds
from tests.layouts import LAYOUTS
from tests.rings import Case
from tests.test_fuzz import Setting, check_rank, mesh_results, num_copies, plain_results

CALLS_OF_ROUND = 50
CALLS_PER_CHECK = 100
ROUNDS_PER_SAMPLE = 5
NUM_LASTING = 2
"""Processes that no failure ends."""
WARM_UP = 0.5
"""Share of the time after which caches and pools are full."""
TERMS = Terms(timeout=20, deadline=120)
CALL = Call(mask=Mask.full(), kernel="reference")
GROWTH = {"MB": 16.0, "descriptors": 6.0, "threads": 3.0}
"""By how much a process may have more at the end than at the start: one group, that of the last
DTensors, may live on until there are others."""


@dataclass(frozen=True)
class Round:
    """The calls of a world, and how it ends.

    Attributes:
        todo: the calls, and whether they are made with DTensors.
        first: number of the first of them.
        failure: name of a function of `FAILURES`.
        difference: what ranks differ in, if that is the failure.
    """

    todo: list[tuple[Case, bool]]
    first: int
    failure: str
    difference: str


Sample = dict[str, float]


@dataclass
class Tally:
    """What was done, and what came of it.

    Attributes:
        counts: by what was done.
        samples: by time and process.
        wrong: what should not have been.
    """

    counts: Counter[str] = field(default_factory=Counter)
    samples: list[list[Sample]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, this: Round, fates: list[Fate]) -> None:
        """Count a round, and see whether each rank ended as it should."""
        self.counts["calls"] += len(this.todo)
        self.counts["compared with dense"] += fates[0].value if fates[0].ended == "returned" else 0
        self.counts[this.failure] += 1
        for rank, fate in enumerate(fates):
            is_victim = FAILURES[this.failure] is die and rank == len(fates) - 1
            if fate.ended != ("SIGKILL" if is_victim else "returned"):
                what = this.difference if FAILURES[this.failure] is differ else this.failure
                self.wrong.append(f"{what}: rank {rank} {fate.ended}: {fate.value}")

    def ends(self) -> Iterator[tuple[int, str, float, float]]:
        """Process, what it holds, how much of it at the start and at the end."""
        settled = self.samples[int(len(self.samples) * WARM_UP) :]
        for process, what in product(range(NUM_LASTING), GROWTH):
            held = [sample[process][what] for sample in settled]
            # The most of each half: what a process holds goes up and down.
            half = len(held) // 2
            yield process, what, max(held[: half or 1]), max(held[half:])

    def problems(self) -> list[str]:
        """What was wrong, and what has grown."""
        grown = [
            f"process {process} holds {end:.0f} {what}, after {start:.0f}"
            for process, what, start, end in self.ends()
            if end - start > GROWTH[what]
        ]
        return self.wrong + grown


def do_round(log: Log, this: Round) -> int:
    """Make the calls of a round, then fail; how many calls were compared."""
    rank, size = dist.get_rank(), dist.get_world_size()
    setting = Setting(size, size)
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))
    num_checked = 0
    for number, (case, as_dtensors) in enumerate(this.todo, this.first):
        results = mesh_results(case, setting, mesh) if as_dtensors else plain_results(case, setting)
        if number % CALLS_PER_CHECK == 0:
            check_rank(case, results, setting, rank)
            num_checked += 1
    FAILURES[this.failure](this)
    return num_checked


def differ(this: Round) -> None:
    """Every rank is told what it is that ranks differ in, unless all are right."""
    difference = DIFFERENCES[this.difference]
    call = difference.calls("contiguous", dist.get_world_size())[dist.get_rank()]
    reported = failure_of_step(call, num_steps=2)
    spared = difference.spares_rank_0 and dist.get_rank() == 0
    assert (reported is None) == (spared or difference.expected(True) is None), (
        this.difference,
        reported,
    )


def break_one(this: Round) -> None:
    """The kernel of the last rank raises, and all raise."""
    is_broken = dist.get_rank() == dist.get_world_size() - 1
    with at_launch("forward", 1, break_kernel) if is_broken else nullcontext():
        reported = failure_of_step(CALL)
    assert reported is not None, "the kernel of a rank raised, and this one was not told"


def break_all(this: Round) -> None:
    """The kernels of all ranks raise, and the next call is right."""
    with patience(), at_launch("backward", 1, break_kernel):
        assert failure_of_step(CALL) is not None
    assert failure_of_step(CALL) is None, "the call after one that failed on all ranks"


def die(this: Round) -> None:
    """The last rank is killed, and all others are told."""
    is_victim = dist.get_rank() == dist.get_world_size() - 1
    with at_launch("backward", 1, kill) if is_victim else nullcontext():
        assert failure_of_step(CALL) is not None, "a rank was killed, and this one was not told"


FAILURES: dict[str, Callable[[Round], None]] = {
    "ranks that differ": differ,
    "kernel of one rank": break_one,
    "kernels of all ranks": break_all,
    "a rank that is killed": die,
}


def failure_of_step(call: Call, num_steps: int = 1) -> str | None:
    """What training steps raise on the default group; they must be right otherwise."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    annotation_of(mesh.get_group()).config = None  # earlier calls used other axes
    configure(call, mesh)
    try:
        errors = [step(call, plain, mesh, training=True) for _ in range(num_steps)]
    except (RuntimeError, ValueError) as error:
        return str(error)
    assert largest(errors) <= call.tolerance, (call, errors)
    return None


def sample(log: Log) -> Sample:
    """What this process holds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def rounds(seed: int, num_cases: int) -> Iterator[tuple[int, Round]]:
    """World sizes and rounds, without end; `num_cases` for each layout and size."""
    chance, layouts = random.Random(seed), [*(x.spec for x in LAYOUTS[:4]), Balanced.name]
    by_size = {
        size: [
            x
            for layout in layouts
            for x in different(cases(layout, size, with_turns=False), num_cases)
        ]
        for size in (2, 3)
    }
    first = 0
    while True:
        failure, difference = (chance.choice([*names]) for names in (FAILURES, DIFFERENCES))
        size = 3 if FAILURES[failure] is die else chance.choice([*by_size])
        drawn = chance.choices(by_size[size], k=CALLS_OF_ROUND)
        # Groups with more ranks than heads are for the op alone, which has all heads on each rank.
        todo = [(case, chance.random() < 0.3 and num_copies(case) == 1) for case in drawn]
        yield size, Round(todo, first, failure, difference)
        first += len(todo)


def soak(minutes: float, seed: int = 0, num_cases: int = 60) -> Tally:
    """Rounds for so long."""
    tally, worlds = Tally(), Worlds()
    end, drawn = monotonic() + 60 * minutes, rounds(seed, num_cases)
    try:
        while monotonic() < end or not tally.samples:
            for _ in range(ROUNDS_PER_SAMPLE):
                size, this = next(drawn)
                tally.add(this, worlds.run(size, do_round, this, terms=TERMS))
            held = [worlds.run([process], sample)[0].value for process in range(NUM_LASTING)]
            tally.samples.append(held)
    finally:
        worlds.close()
    return tally


def report(tally: Tally) -> Iterator[str]:
    """The summary, in Markdown."""
    yield from ("| what | number |", "| --- | ---: |")
    yield from (f"| {what} | {number:,} |" for what, number in tally.counts.items())
    yield f"| wrong | {len(tally.wrong)} |"
    yield from (
        "",
        "| process | holds | at the start | at the end |",
        "| --- | --- | ---: | ---: |",
    )
    yield from (f"| {who} | {what} | {a:.0f} | {b:.0f} |" for who, what, a, b in tally.ends())
    yield from ("", *tally.problems())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    arguments = parser.parse_args()
    tally = soak(arguments.minutes, arguments.seed)
    print("\n".join(report(tally)))
    sys.exit(1 if tally.problems() else 0)


if __name__ == "__main__":
    main()
