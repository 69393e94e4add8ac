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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import randrange
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

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
    """

    fates: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Program, Fate]] = field(default_factory=list)

    def add(self, program: Program, fate: Fate) -> None:
        """Count a program."""
        self.fates[fate.verdict] += 1
        if fate.is_good and fate.said:
            reason = re.sub(r"\d+", "N", fate.said.partition("\n")[0])[:110]
            self.refusals[f"{program.steps[fate.step].rule}: {fate.verdict}: {reason}"] += 1

    @property
    def share_right(self) -> float:
        return self.fates["right"] / max(1, self.fates.total())

    def report(self) -> Iterator[str]:
        """The summary, in Markdown."""
        yield from ("| outcome | programs |", "| --- | ---: |")
        yield from (f"| {verdict} | {number:,} |" for verdict, number in self.fates.most_common())
        yield from ("", "| refused at | programs |", "| --- | ---: |")
        yield from (f"| {reason} | {number:,} |" for reason, number in self.refusals.most_common())


def drawn(
    ranks: int, number: int, seed: int | None, compiles: bool = False, phases: Any = None
) -> Callable[[Callable[[Program], None]], Callable[[], None]]:
    """Decorates a function of a program: it then is called with so many.

    Args:
        ranks: that the programs run on.
        number: of programs.
        seed: another one draws others; without one they are the same in every run.
        compiles: whether some compile the model.
        phases: of hypothesis.
    """

    def decorate(function: Callable[[Program], None]) -> Callable[[], None]:
        test = given(programs(ranks, compiles))(function)
        how: dict[str, Any] = {"derandomize": True} if seed is None else {}
        how |= {"phases": phases} if phases else {}
        test = settings(
            max_examples=number,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            **how,
        )(test)
        return test if seed is None else seeded(seed)(test)

    return decorate


def failure(program: Program, fate: Fate) -> str:
    """A program that failed, as its user would paste it, and what came of it."""
    return f"{program}\n\n# step {fate.step}: {fate.verdict}: {fate.said}"


def explore(pool: Pool, ranks: int, number: int, seed: int, tally: Tally, shrinks: bool) -> None:
    """Try programs of one seed, and note the shortest of those that fail."""
    failed: list[tuple[Program, Fate]] = []
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]

    @drawn(ranks, number, seed, compiles=True, phases=phases)
    def try_one(program: Program) -> None:
        fate = fate_of(pool, program, run_program)
        if not failed:
            tally.add(program, fate)
        if not fate.is_good:
            failed.append((program, fate))
        assert fate.is_good

    try:
        try_one()
    except AssertionError:
        tally.failures.append(failed[-1])
        print(failure(*failed[-1]), flush=True)


def fuzz(number: int, seed: int, shrinks: bool, ranks: tuple[int, ...] = (2, 3)) -> Tally:
    """Try so many programs, in turn on each number of ranks."""
    pool, tally, start = Pool(max(ranks)), Tally(), time.monotonic()
    try:
        for chunk in range(10 * number):
            wanted = min(CHUNK, number - tally.fates.total())
            if wanted <= 0:
                break
            explore(pool, ranks[chunk % len(ranks)], wanted, seed + chunk, tally, shrinks)
            took = time.monotonic() - start
            print(f"{tally.fates.total():,} programs, {took:.0f} s: {dict(tally.fates)}", flush=True)
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
