"""What a check runs on, and what its steps find there."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from harness import ROOT
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    compiler: str = "inductor"
    dtype: torch.dtype = torch.bfloat16
    side: int = 8192
    """Tokens of a rank, where speed is measured."""
    repeats: int = 5
    is_dry: bool = False
    expected: tuple[str, ...] = ()
    """Kernels that have to run."""
    run: Run = run
    seconds: float = 570
    """That all steps together may take."""
    _start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self._start)

    @contextmanager
    def connected(self) -> Iterator[DeviceMesh]:
        """A mesh of one rank, which ends with the context."""
        dist.init_process_group(self.backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield init_device_mesh(self.device, (1,), mesh_dim_names=("cp",))
        finally:
            dist.destroy_process_group()
