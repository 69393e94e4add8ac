"""Check and measure GPUs: what is right, what is fast, and what falls short.

Run ``python benchmarks/gpu_check.py``, or ``make gpu-check``, which passes ``ARGS`` on, for one
GPU; ``torchrun --nproc-per-node 8 benchmarks/gpu_check.py`` for several. It needs what is installed
and nothing else: its first lines say what it leaves out. Each run takes the steps that have no
result yet, for ten minutes, and adds what they found to one file in ``benchmarks/results``, in a
folder named after the GPU. At the end come what is wrong, and which aims were missed.
``--dry-run`` lists the steps, and needs no GPU. benchmarks/gpu_steps/README.md has what to run.
"""

import argparse
import faulthandler
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_steps.any_mask import any_mask
from gpu_steps.bandwidth import bandwidth
from gpu_steps.bound import bound
from gpu_steps.by_processes import by_processes
from gpu_steps.by_threads import by_threads
from gpu_steps.card import Card
from gpu_steps.findings import Findings, Taken
from gpu_steps.host import host
from gpu_steps.inference import inference
from gpu_steps.installed import installed
from gpu_steps.machine import Finding, Machine
from gpu_steps.messages import messages
from gpu_steps.over_ranks import agreement, differing, hops, right, speed
from gpu_steps.public import public
from gpu_steps.quantising import eight_bits
from gpu_steps.replays import replays
from gpu_steps.serving import serving
from gpu_steps.skips import skips
from gpu_steps.suite import sanitized, suite
from gpu_steps.tiles import tiles
from harness import folder_of, origin

Step = Callable[[Machine], Iterator[Finding]]


class Planned(NamedTuple):
    """A step, and the seconds that it takes, as far as one knows."""

    about: str
    seconds: float
    take: Step | None
    """None for the card, which keeps rows of its own."""


ALONE = {
    "installed": Planned("versions, and kernels that run", 5, installed),
    "public": Planned("public calls: autocast, compiled, CUDA graphs, no waits", 60, public),
    "bandwidth": Planned("how fast parts are merged", 10, bandwidth),
    "eight_bits": Planned("keys and values in eight bits: speed, rings", 20, eight_bits),
    "bound": Planned("the tiles of 8 x 8k tokens by kernel, arrivals there", 40, bound),
    "tiles": Planned("tiles next to one launch", 20, tiles),
    "masks": Planned("windows, documents: one launch for a step, or many", 90, any_mask),
    "host": Planned("the host's time of a call next to PyTorch's", 10, host),
    "graphs": Planned("100 packings, a token and a model by CUDA graphs", 120, replays),
    "messages": Planned("a rank's messages to itself, beside attention", 20, messages),
    "processes": Planned("4 processes on one GPU: every call, agreement", 90, by_processes),
    "inference": Planned("pools, selected keys, a model that serves", 30, inference),
    "serving": Planned("16 requests at once, next to a loop and transformers", 60, serving),
    "threads": Planned("whole rings of 8 ranks on one GPU, against float64", 240, by_threads),
    "card": Planned("rings of 4 and 8 ranks, PyTorch's, emulated links", 220, None),
    "tests": Planned("all tests that need a GPU", 240, suite),
    "sanitizer": Planned("two small rings under compute-sanitizer, by --sanitize", 600, sanitized),
}
"""In the order in which they tell most, on one GPU."""
TOGETHER = {
    "right": Planned("every call over NCCL, against float64", 60, right),
    "hops": Planned("what of each hop attention hides, from traces", 30, hops),
    "speed": Planned("ours, PyTorch's, Ulysses and one launch, 2k to 64k", 300, speed),
    "agreement": Planned("what it costs a call that ranks compare it", 30, agreement),
    "differing": Planned("a call that differs on one rank, under NCCL alone", 20, differing),
}
"""By all ranks of torchrun."""
ON_REQUEST = "sanitizer"
GRACE, MARGIN = 20, 60
"""Seconds beyond the time of all steps, and beyond three times those planned for one: then it
hangs."""
NO_GPU = "gpu_check needs a CUDA device, and torch sees none: torch.cuda.is_available() is False"


class Report:
    """Takes steps, says what they find, and keeps it; of several ranks, the first one does."""

    def __init__(self, machine: Machine, findings: Findings, commit: str = "") -> None:
        self._machine, self._findings, self._commit = machine, findings, commit

    def run(self, name: str, planned: Planned, again: bool = False) -> bool:
        """Take a step, and return whether the GPU still works for the others.

        What a step raises is found, too, so that they run.
        """
        if again and planned.take is None:
            self._findings.card = Card()
        before = self._findings.steps.pop(name, Taken())
        taken = self._findings.steps[name] = before.begun_again(again)
        taken.commit, start = self._commit, time.monotonic()
        self._machine.found.clear()
        self._machine.found.update(taken.findings)
        # Steps look at the time themselves; this is for one that waits for ever.
        limit = 3 * planned.seconds + MARGIN
        if name != ON_REQUEST:
            limit = min(limit, max(0.0, self._machine.left) + GRACE)
        late = Timer(limit, self.give_up, [name])
        late.daemon = True
        late.start()
        try:
            self._take(taken, planned.take or self._findings.card)
        finally:
            late.cancel()
        is_alive = self._is_alive(taken)
        taken.seconds = time.monotonic() - start
        self._keep()
        return is_alive

    def _keep(self) -> None:
        if self._machine.rank == 0:
            self._findings.keep()

    def _take(self, taken: Taken, step: Step) -> None:
        try:
            for x in step(self._machine):
                taken.add(x)
                self.say(x.what, x.found, "WRONG" if x.is_wrong else "")
                self._keep()  # this process may be killed
            taken.has_ended = True
        except Exception as error:  # drivers and compilers raise what they like
            taken.add(ended(f"{type(error).__name__}: {error}"[-500:]))
            self.say(*taken.findings[ENDED][:2])

    def _is_alive(self, taken: Taken) -> bool:
        """After a kernel that wrote past its memory all that this process launches fails."""
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            taken.add(ended(f"this process lost its GPU: {error}"[:500]))
            taken.has_ended = False
            self.say(*taken.findings[ENDED][:2], "the other steps are left for the next run")
            return False
        return True

    def say(self, *texts: str) -> None:
        if self._machine.rank == 0:
            print(*texts, sep="  ", flush=True)

    def give_up(self, name: str) -> None:
        """Keep the results so far and exit, because a step hangs."""
        faulthandler.dump_traceback()
        self._findings.steps[name].add(ended("it took too long"))
        self.publish()
        if self._machine.rank:
            time.sleep(GRACE)  # torchrun ends all ranks with the first: that one writes
        os._exit(1)

    def publish(self) -> int:
        """Write all results; 1 if something is wrong."""
        if self._machine.rank == 0:
            self._findings.keep()
            self._findings.publish(torch.cuda.get_device_name())
        return int(self._findings.is_wrong)


ENDED = "the step ended early"


def ended(why: str) -> Finding:
    return Finding(ENDED, why, is_wrong=True)


def to_do(steps: dict[str, Planned], findings: Findings, options: argparse.Namespace) -> list[str]:
    """Names of the steps to take: first those that were never begun, then those unfinished."""
    if options.only:
        return [name for name in steps if name in options.only]
    wanted = [name for name in steps if name != ON_REQUEST or options.sanitize]
    left = [
        name
        for name in wanted
        if options.again or name not in findings.steps or not findings.steps[name].is_done
    ]
    return sorted(left, key=lambda name: name in findings.steps)


def preface(report: Report, names: list[str], steps: dict[str, Planned], found: Findings) -> None:
    """The first lines: where this runs, what it leaves out and why, and what it will do."""
    report.say(f"torch {torch.__version__}, Python {platform.python_version()}, installs nothing")
    for line in skips():
        report.say("left out", line)
    report.say("left out", BY_TORCHRUN if steps is ALONE else BY_ONE)
    for name in steps:
        if name in names:
            continue
        taken = found.steps.get(name)
        reason = f"has a result, of commit {taken.commit}" if taken else "was not asked for"
        report.say("left out", f"step {name}: {reason}")
    seconds = sum(steps[name].seconds for name in names)
    report.say("to do", ", ".join(names) or "nothing", f"about {seconds:.0f} s")


BY_TORCHRUN = "steps of several GPUs: torchrun --nproc-per-node 8 benchmarks/gpu_check.py"
BY_ONE = "steps of one GPU: python benchmarks/gpu_check.py"


def check(machine: Machine, findings: Findings, options: argparse.Namespace) -> int:
    """Take the steps that have no result, and keep what they find; 1 if something is wrong."""
    report = Report(machine, findings, origin()["commit"])
    steps = TOGETHER if machine.world_size > 1 else ALONE
    names = to_do(steps, findings, options)
    preface(report, names, steps, findings)
    for name in names:
        seconds = steps[name].seconds
        if machine.agreed_left() < min(seconds, LEAST) and name != ON_REQUEST:
            report.say(f"step {name}", "left for the next run: no time was left")
            continue
        if not report.run(name, steps[name], options.again):
            break
    return report.publish()


LEAST = 30
"""Seconds that have to be left to begin a step."""


def dry_run(findings: Findings) -> None:
    """List the steps, their seconds, and which of them have a result."""
    for steps, how in ((ALONE, "one GPU"), (TOGETHER, "torchrun, each rank a GPU")):
        print(f"{how}, about {sum(x.seconds for x in steps.values()):.0f} s:")
        for name, planned in steps.items():
            is_done = name in findings.steps and findings.steps[name].is_done
            state = "  (has a result)" if is_done else ""
            print(f"  {name:<10} {planned.seconds:>4.0f} s  {planned.about}{state}")


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    every = [*ALONE, *TOGETHER]
    parser.add_argument("--dry-run", action="store_true", help="list the steps and their seconds")
    parser.add_argument("--only", nargs="+", default=[], choices=every, help="some of the steps")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--expect", nargs="+", default=[], help="kernels that have to run")
    parser.add_argument("--sanitize", action="store_true", help="with compute-sanitizer, too")
    parser.add_argument("--seconds", type=float, default=570, help="at most, without --sanitize")
    return parser.parse_args(words)


def main() -> int:
    options = parsed()
    has_gpu = torch.cuda.is_available()
    folder = folder_of(torch.cuda.get_device_name() if has_gpu else "a GPU")
    findings = Findings.of_folder(options.out or folder, folder)
    if options.dry_run:
        dry_run(findings)
        return 0
    if not has_gpu:
        print(NO_GPU)
        return 2
    how: dict[str, Any] = {"expected": tuple(options.expect), "seconds": options.seconds}
    if dist.is_torchelastic_launched():
        torch.cuda.set_device(dist.get_node_local_rank())
        dist.init_process_group("nccl")  # alone, as launchers and trainers make it
        how |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        if how["world_size"] == 1:
            dist.destroy_process_group()  # steps of one GPU make their own
    status = check(Machine(**how), findings, options)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
