"""What a check runs on, and what its steps find there."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import ROOT
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpu_steps.processes import run_ranks
from gpu_steps.traces import KernelSpan, spans_of

Run = Callable[[list[str], float], "tuple[int, str]"]
"""Runs a command with a limit of seconds, and returns its status and its output."""


class Finding(NamedTuple):
    """A row of the report."""

    what: str
    found: str
    aim: str = ""
    """The aim that this falls short of."""
    is_wrong: bool = False
    """Whether something fails, or is not right."""
    is_left_out: bool = False
    """Whether the time ended before it, so that the next run has it still to find."""


def left_out(what: str) -> Finding:
    return Finding(what, "left out: no time was left", is_left_out=True)


def compared(what: str, error_of: Callable[[], float], largest: float) -> Finding:
    """An error, which is wrong if it is larger, NaN, or raised: other rows are still worth it."""
    try:
        error = error_of()
    except Exception as problem:  # drivers and compilers raise what they like
        return failed(what, problem)
    return Finding(what, f"off by {error:.0e}", is_wrong=not error <= largest)


def failed(what: str, problem: Exception) -> Finding:
    return Finding(what, f"{type(problem).__name__}: {problem}"[:500], is_wrong=True)


def run(command: list[str], seconds: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return -1, f"{text}\nno end after {seconds:.0f} s"
    return done.returncode, done.stdout


@dataclass(frozen=True)
class Machine:
    """Where tensors are, what connects ranks, and how large the cases are.

    The defaults are those of a GPU. A dry run has small cases on a CPU, with stand-ins for what is
    CUDA's alone.
    """

    device: str = "cuda"
    backend: str = "nccl"
    beside: str = "cpu:gloo,cuda:nccl"
    """A backend that moves messages of CPUs, too."""
    compiler: str = "inductor"
    dtype: torch.dtype = torch.bfloat16
    side: int = 8192
    """Tokens of a rank, where speed is measured."""
    repeats: int = 5
    is_dry: bool = False
    expected: tuple[str, ...] = ()
    """Kernels that have to run."""
    run: Run = run
    run_ranks: Callable[..., list[Any]] = run_ranks
    """`(world_size, function, *arguments, seconds=)`: what the function returns on each rank."""
    spans_of: Callable[[Callable[[], object]], list[KernelSpan]] = spans_of
    """What the GPU did while something ran."""
    world_size: int = 1
    """Processes that take these steps together; each has a GPU."""
    rank: int = 0
    """Of these."""
    found: set[str] = field(default_factory=set)
    """What earlier runs of a step found, which it does not look for again."""
    seconds: float = 570
    """That all steps together may take."""
    _start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self._start)

    def agreed_left(self) -> float:
        """Seconds that are left on the first rank: all ranks begin the same."""
        seconds = [self.left]
        if self.world_size > 1:
            dist.broadcast_object_list(seconds)
        return seconds[0]

    def largest(self, numbers: list[float]) -> list[float]:
        """Each number on the rank where it is largest."""
        if self.world_size == 1:
            return numbers
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    @contextmanager
    def connected(self) -> Iterator[DeviceMesh]:
        """A mesh of this rank alone, or of all that take these steps; it ends with the context."""
        if self.world_size > 1:
            yield init_device_mesh(self.device, (self.world_size,), mesh_dim_names=("cp",))
            return
        dist.init_process_group(self.backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield init_device_mesh(self.device, (1,), mesh_dim_names=("cp",))
        finally:
            dist.destroy_process_group()
