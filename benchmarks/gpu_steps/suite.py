"""The tests that need a GPU, and those that a memory checker watches."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import ROOT

from gpu_steps.alone import best_kernels
from gpu_steps.machine import Finding, Machine, left_out
from gpu_steps.skips import gpu_tests, missing_packages, without_pytest

CHECKER = "compute-sanitizer"
MAX_SECONDS = 240
"""Seconds of one run of pytest, so that other steps have theirs."""
SANITIZED = 900
"""Seconds under the memory checker, which slows kernels down: asked for only."""


def files() -> list[str]:
    """Test files with a test of a GPU that can be imported here."""
    there = [path for path in gpu_tests() if not missing_packages(path)]
    return [str(path.relative_to(ROOT)) for path in there]


def suite(machine: Machine) -> Iterator[Finding]:
    if reason := without_pytest():
        yield Finding("tests", f"left out: {reason}")
        return
    # Kernels in Python apart: their compiler is young, and a test that hangs ends all after it.
    for which in ("not flash_attn4 and not cudnn_flex", "flash_attn4", "cudnn_flex"):
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-k", which, *files()]
        yield _finding(f"tests, {which}", machine, command, min(MAX_SECONDS, machine.left - 5))


def sanitized(machine: Machine) -> Iterator[Finding]:
    """A small zigzag ring and one of documents, by kernel."""
    checker = shutil.which(CHECKER)
    if checker is None:
        yield Finding(CHECKER, "is not installed: it comes with the CUDA toolkit", is_wrong=True)
        return
    for kernel in best_kernels(machine.device):
        which = f"test_ring and {kernel} and (zigzag or documents) and not (ranks or groups)"
        test = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-k", which]
        watched = [checker, "--tool", "memcheck", "--error-exitcode", "9", *test]
        command = [*watched, str(Path("tests") / "test_played.py")]
        yield _finding(f"{CHECKER}, {kernel}", machine, command, SANITIZED)


def _finding(what: str, machine: Machine, command: list[str], seconds: float) -> Finding:
    torch.cuda.empty_cache()  # the command wants memory, too
    if seconds < 1:
        return left_out(what)
    status, text = machine.run(command, seconds)
    lines = [line for line in text.splitlines() if line.strip()] or ["printed nothing"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "========= "))]
    # 5 is pytest's status where no test was chosen.
    is_wrong = status not in (0, 5)
    return Finding(
        what, "; ".join([*failed[:20], lines[-1]] if is_wrong else lines[-1:]), "", is_wrong
    )
