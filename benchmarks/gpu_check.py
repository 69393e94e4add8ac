"""Check and measure a GPU in ten minutes: what is right, what is fast, and what falls short.

Run ``python benchmarks/gpu_check.py``, or ``make gpu-check``, which passes ``ARGS`` on. Each step
says what it found; at the end come what is wrong, and which aims were missed. Tables go to
``benchmarks/results``, in a folder named after the GPU, to be committed. ``--only public tiles``
runs some of the steps, ``--sanitize`` watches two small rings by compute-sanitizer as well, and
``--expect flash_attn3`` fails if that kernel does not run.
"""

import argparse
import faulthandler
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from threading import Timer
from typing import Any

import torch
from gpu_steps.bandwidth import bandwidth
from gpu_steps.card import Card
from gpu_steps.installed import installed
from gpu_steps.machine import Finding, Machine
from gpu_steps.messages import messages
from gpu_steps.public import public
from gpu_steps.suite import sanitized, suite
from gpu_steps.tables import Overlap, Row, draw, report
from gpu_steps.tiles import tiles
from harness import origin, publish
from rich.console import Console

Step = Callable[[Machine], Iterator[Finding]]

NAMES = ("installed", "public", "messages", "bandwidth", "tiles", "card", "tests")
GRACE = 30
"""Seconds beyond the time of all steps, for one that looks at its time too late."""
NO_GPU = "gpu_check needs a CUDA device, and torch sees none: torch.cuda.is_available() is False"


class Report:
    """What the steps found, on the screen and in files."""

    def __init__(self, machine: Machine, is_part: bool) -> None:
        self._machine, self._is_part = machine, is_part
        self._found: dict[str, list[Finding]] = {}
        self.card = Card()

    @property
    def is_wrong(self) -> bool:
        return any(x.is_wrong for findings in self._found.values() for x in findings)

    def run(self, name: str, step: Step) -> None:
        """What a step raises is found, too, so that the others still run."""
        found = self._found[name] = []
        try:
            for x in step(self._machine):
                self._add(found, x)
        except Exception as error:  # drivers and compilers raise what they like
            self._add(found, ended(f"{type(error).__name__}: {error}"[:500]))

    def _add(self, findings: list[Finding], found: Finding) -> None:
        findings.append(found)
        print(found.what, found.found, "WRONG" if found.is_wrong else "", sep="  ", flush=True)

    def give_up(self) -> None:
        """Save the results so far and exit, because a step hangs."""
        faulthandler.dump_traceback()
        list(self._found.values())[-1].append(ended("it took too long"))
        self.write()
        os._exit(1)

    def write(self) -> None:
        about = origin() | {"GPU": torch.cuda.get_device_name()}
        card, is_quick = self.card, self._machine.is_dry or self._is_part
        measured = {
            "findings": {name: [list(x) for x in found] for name, found in self._found.items()},
            "rows": [_plain(x) for x in card.rows],
            "overlaps": [_plain(x) for x in card.overlaps],
        }
        show = partial(_show, found=self._found, card=card)
        folder = publish("gpu", "A GPU, checked and measured", is_quick, about, measured, show)
        if card.rows:
            draw(folder / "gpu.png", card.rows)


def ended(why: str) -> Finding:
    return Finding("the step ended early", why, is_wrong=True)


def check(machine: Machine, only: Sequence[str] = (), sanitize: bool = False) -> int:
    """Run the steps, show and keep what they found; 1 if something is wrong."""
    report = Report(machine, bool(only))
    steps: tuple[Step, ...] = installed, public, messages, bandwidth, tiles, report.card, suite
    # Steps look at the time themselves; this is for one that waits for ever.
    late = Timer(machine.left + GRACE, report.give_up)
    late.daemon = True
    late.start()
    for name, step in zip(NAMES, steps, strict=True):
        if not only or name in only:
            report.run(name, step)
    late.cancel()
    if sanitize:
        report.run("sanitizer", sanitized)
    report.write()
    return int(report.is_wrong)


def _show(console: Console, found: dict[str, list[Finding]], card: Card) -> None:
    every = [(name, x) for name, findings in found.items() for x in findings]
    wrong = [f"{name}: {x.what}: {x.found}" for name, x in every if x.is_wrong]
    short = [f"{name}: {x.what}: {x.found}; the aim is {x.aim}" for name, x in every if x.aim]
    for title, lines in (("Wrong", wrong), ("Short of an aim", short)):
        console.print(f"\n## {title}\n")
        for line in lines or ["nothing"]:
            console.print(f"- {line}", highlight=False, markup=False)
    for name, findings in found.items():
        console.print(f"\n## {name.capitalize()}\n")
        for x in findings:
            console.print(f"- {x.what}: {x.found}", highlight=False, markup=False)
    if card.rows:
        report(console, card.rows, card.overlaps)


def _plain(found: Row | Overlap) -> dict[str, Any]:
    """The value as JSON takes it."""
    return asdict(found) | {"attention": str(found.attention)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], choices=NAMES, help="some of the steps")
    parser.add_argument("--expect", nargs="+", default=[], help="kernels that have to run")
    parser.add_argument("--sanitize", action="store_true", help="with compute-sanitizer, too")
    parser.add_argument("--seconds", type=float, default=570, help="at most, without --sanitize")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(NO_GPU)
        return 2
    machine = Machine(expected=tuple(arguments.expect), seconds=arguments.seconds)
    return check(machine, arguments.only, arguments.sanitize)


if __name__ == "__main__":
    raise SystemExit(main())
