"""Compiles launches of Triton kernels without a GPU, and reads the machine code."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import torch

from dtensor_ring.compute.memory import Accumulation

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
"""An A100, an H100 or H200, a B200, and an MI300."""

_PTX = re.compile(
    r"\b(?:(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)|(bar)\.sync"
    r"|cp\.async\S*\.global .*?\], (0x\w+))\b"
)
_AMD = re.compile(r"\b(?:(?:global|buffer)_(load|store)_(\w+)|s_(barrier))\b")
_AMD_BYTES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


@dataclass(frozen=True)
class MachineCode:
    """What a compiler made of a launch.

    Attributes:
        num_threads: of a program.
        num_registers: of a thread, 4 bytes each.
        spilled: bytes of a thread that registers do not hold, but memory.
        accesses: in the order of the code: "load" or "store" of global memory with the bytes of a
            thread, and ("barrier", 0).
    """

    num_threads: int
    num_registers: int
    spilled: int
    accesses: list[tuple[str, int]]

    @classmethod
    def of(cls, compiled: Any) -> MachineCode:
        """Read the code of a kernel that Triton compiled."""
        metadata = compiled.metadata
        num_threads = metadata.num_warps * metadata.target.warp_size
        if metadata.target.backend == "cuda":
            return cls(num_threads, *_resources(compiled.asm["cubin"]), _ptx(compiled.asm["ptx"]))
        text = compiled.asm["amdgcn"]
        registers, in_memory, spills = (
            int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])
            for name in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        )
        return cls(num_threads, registers, in_memory + 4 * spills, _amdgcn(text))

    def __str__(self) -> str:
        accesses = ", ".join(f"{n} x {what} {size}" for (what, size), n in self._counts.items())
        return f"{self.num_registers} registers, {self.spilled} bytes spilled, {accesses}"

    @property
    def _counts(self) -> Counter[tuple[str, int]]:
        return Counter(self.accesses)

    def widths(self, what: str) -> list[int]:
        """Return the bytes of a thread that each "load" or "store" moves."""
        return [width for name, width in self.accesses if name == what]

    def has_barrier(self) -> bool:
        """Return whether a barrier stands between the last load and the first store."""
        names = [name for name, _ in self.accesses]
        last_load = len(names) - 1 - names[::-1].index("load")
        return "barrier" in names[last_load : names.index("store")]


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers of a thread, and bytes of it in memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (
        int(re.findall(rf"\b{name}:(\d+)", text)[-1]) for name in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def _ptx(text: str) -> list[tuple[str, int]]:
    names = {"ld": "load", "st": "store"}
    found = []
    for what, number, bits, barrier, to_shared in _PTX.findall(text):
        if to_shared:
            found.append(("load", int(to_shared, 16)))
        else:
            num_bytes = 0 if barrier else int(number or 1) * int(bits) // 8
            found.append(("barrier" if barrier else names[what], num_bytes))
    return found


def _amdgcn(text: str) -> list[tuple[str, int]]:
    found = []
    for what, kind, barrier in _AMD.findall(text):
        # As in `ushort` and `short_d16_hi`.
        name = kind.removeprefix("u").removeprefix("s" if kind.startswith("sb") else "")
        found.append(("barrier", 0) if barrier else (what, _AMD_BYTES[name.split("_")[0]]))
    return found


class NoDriver:
    """Stands for that of a GPU, so that kernels are compiled for it without one."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        kind, _, capability = self._architecture.partition("_")
        if kind == "sm":
            return GPUTarget("cuda", int(capability), 32)
        return GPUTarget("hip", self._architecture, 64)


class Compiling:
    """In place of the kernel: a launch is compiled, not run.

    Attributes:
        last: what Triton compiled for the last launch.
        options: of the last launch, by name.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.last: Any = None
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._compile, grid=grid)

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        self.last = self.kernel.warmup(*args, **kwargs)
        self.options = {name: getattr(x, "value", x) for name, x in kwargs.items()}

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a program of the last launch."""
        return self.options["BLOCK_ROWS"], self.options["BLOCK_DIMS"]

    @property
    def number(self) -> int:
        """Of variants."""
        return len(self.kernel.device_caches[0][0])


@contextmanager
def compiling(
    architecture: str,
    module: str = "dtensor_ring.compute.merge_triton",
    kernel: str = "_accumulate_sums",
) -> Iterator[Compiling]:
    """The launches of a block are compiled for GPUs of that architecture."""
    from triton.runtime import driver

    launching = import_module(module)
    found = Compiling(getattr(launching, kernel))
    found.kernel.device_caches.clear()
    with (
        patch.object(driver, "_active", NoDriver(architecture)),
        patch.object(launching, kernel, found),
        patch.object(torch.cuda, "device_of", lambda x: nullcontext()),
    ):
        yield found
    found.kernel.device_caches.clear()


def launch(*sums: Accumulation) -> None:
    """Launch Triton's merge, which is imported on first use."""
    from dtensor_ring.compute.merge_triton import accumulate_sums

    accumulate_sums(*sums)
