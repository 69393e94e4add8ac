"""Draws programs that users write, runs them over the pool, and counts what came of them.

    make border ARGS="--programs 200 --seed 7"

Exits with 1 if a program gives other numbers than the stock model in silence, an error from
inside of a library, an error on some ranks only, or hangs.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import randrange

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.border.programs import Program, programs
from tests.border.running import Fate, fate_of, run_program
from tests.pool import Pool, start_server

ENOUGH = 0.6
"""Share of programs that run to their end, so that not all is refused."""
CHUNK = 50
"""Programs of one seed: hypothesis ends at the first that fails, and makes it short."""


@dataclass
class Tally:
    """What came of programs.

    Attributes:
        fates: how many, by verdict.
        refusals: how many, by what an error says first, and the family of the step.
        failures: programs that failed, and what came of them.
        num_chunks: how many seeds they come from.
    """

    fates: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Program, Fate]] = field(default_factory=list)
    num_chunks: int = 0

    def add(self, fates: dict[Program, Fate], failed: Program | None) -> None:
        """Count the programs of a chunk; of those that fail, the shortest."""
        self.num_chunks += 1
        for program, fate in fates.items():
            if fate.is_good or program == failed:
                self.fates[fate.verdict] += 1
            if fate.is_good and fate.said:
                reason = re.sub(r"\d+", "N", fate.said.partition("\n")[0])[:110]
                self.refusals[f"{program.steps[fate.step].rule}: {fate.verdict}: {reason}"] += 1
        if failed is not None:
            self.failures.append((failed, fates[failed]))
            print(failure(failed, fates[failed]), flush=True)

    @property
    def share_right(self) -> float:
        return self.fates["right"] / max(1, self.fates.total())

    def report(self) -> Iterator[str]:
        """The summary, in Markdown."""
        yield from ("| outcome | programs |", "| --- | ---: |")
        yield from (f"| {verdict} | {number:,} |" for verdict, number in self.fates.most_common())
        yield from ("", "| refused at | programs |", "| --- | ---: |")
        yield from (f"| {reason} | {number:,} |" for reason, number in self.refusals.most_common())


def failure(program: Program, fate: Fate) -> str:
    """A program that failed, as its user would paste it, and what came of it."""
    return f"{program}\n\n# step {fate.step}: {fate.verdict}: {fate.said}"


def explore(
    strategy: st.SearchStrategy[Program],
    run: Callable[[Program], Fate],
    number: int,
    seed: int | None = None,
    shrinks: bool = True,
) -> tuple[dict[Program, Fate], Program | None]:
    """Run different programs until one fails; then the shortest that fails, too.

    Args:
        strategy: draws one.
        run: says what came of one.
        number: how many.
        seed: another one draws others; without one they are the same in every run.
        shrinks: whether the one that fails is made short.
    """
    fates: dict[Program, Fate] = {}
    failed: list[Program] = []

    def try_one(program: Program) -> None:
        if program not in fates:
            if len(fates) >= number and not failed:
                return
            fates[program] = run(program)
        if not fates[program].is_good:
            failed.append(program)
        assert fates[program].is_good, failure(program, fates[program])

    test = settings(
        max_examples=4 * number,  # hypothesis repeats some
        deadline=None,
        database=None,
        derandomize=seed is None,
        print_blob=False,  # the program itself is printed
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(given(strategy)(try_one))
    try:
        (test if seed is None else seeded(seed)(test))()
    except AssertionError:
        return fates, failed[-1]
    return fates, None


def fuzz(number: int, seed: int, shrinks: bool, ranks: Sequence[int] = (2, 3)) -> Tally:
    """Try so many programs, in turn on each number of ranks."""
    pool, tally, start = Pool(max(ranks)), Tally(), time.monotonic()
    try:
        while tally.fates.total() < number:
            of_chunk = ranks[tally.num_chunks % len(ranks)]
            wanted = min(CHUNK, number - tally.fates.total())
            strategy = programs(of_chunk, compiles=True)
            run = partial(fate_of, pool, run=run_program)
            tally.add(*explore(strategy, run, wanted, seed + tally.num_chunks, shrinks))
            took = time.monotonic() - start
            print(
                f"{tally.fates.total():,} programs, {took:.0f} s: {dict(tally.fates)}", flush=True
            )
    finally:
        pool.close()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=randrange(2**31), help="of what is drawn")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--as-drawn", action="store_true", help="do not make failures shorter")
    given = parser.parse_args()
    print(f"random programs: again by --seed {given.seed}", flush=True)
    start_server()
    tally = fuzz(given.programs, given.seed, not given.as_drawn, tuple(given.ranks))
    print(*tally.report(), sep="\n")
    sys.exit(1 if tally.failures or tally.share_right < ENOUGH else 0)


if __name__ == "__main__":
    main()
