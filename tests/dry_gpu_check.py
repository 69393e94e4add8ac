"""Runs `benchmarks/gpu_check.py` on a CPU, with stand-ins: `python -m tests.dry_gpu_check`.

Its results go to the folder `out`, and its status is that of the check.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from dtensor_ring.transport.transport import P2P, ProcessGroupTransport
from tests.fake_cuda import fake_cuda

ROOT = Path(__file__).parent.parent
PYTEST_OPTIONS = ("-m", "-q", "-k", "--tool", "--error-exitcode")
SPANS = (
    ("void flash_fwd_kernel<...>", 0.0, 1.0),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0.9, 1.1),
    ("_accumulate_sums", 1.2, 1.3),
)
"""What a GPU does, always the same: half of a message is exposed, then it idles."""


class Done:
    def wait(self) -> None:
        """Nothing to wait for."""


def to_itself(self: ProcessGroupTransport, receives: list[P2P], sends: list[P2P]) -> list[Done]:
    """Copies, as gloo sends nothing to the rank itself."""
    for target, source in zip(receives, sends, strict=True):
        target.flat.copy_(source.flat)
    return [Done() for _ in receives + sends]


def run(command: list[str], seconds: float) -> tuple[int, str]:
    """Looks at a command instead: its programs, options and files are there."""
    assert seconds > 0
    for word in command:
        if word.startswith("-"):
            assert word in PYTEST_OPTIONS, word
        elif word.startswith("tests/"):
            assert (ROOT / word).exists(), word
    assert Path(command[0]).exists()
    return 0, "1 passed"


def spans_of(run: Callable[[], object]) -> list[Any]:
    from gpu_steps.traces import KernelSpan

    run()
    return [KernelSpan(*span) for span in SPANS]


def of_benchmarks(module: str, function: str, *arguments: Any) -> Any:
    """What a function of the benchmarks returns in a process that does not know them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return getattr(import_module(module), function)(*arguments)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def together(words: Sequence[str], folder: str) -> int:
    """The steps of several ranks, of which this process is one."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    where = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    return checked(words, Path(folder), **where)


def checked(words: Sequence[str], folder: Path, **more: Any) -> int:
    """The status of a check whose machine is a CPU.

    Args:
        words: of the command line.
        folder: of the results.
        more: fields of the machine.
    """
    from gpu_check import check, parsed
    from gpu_steps.findings import Findings
    from gpu_steps.machine import Machine

    with ExitStack() as stand_ins:
        stand_ins.enter_context(fake_cuda())
        stand_ins.enter_context(patch("shutil.which", lambda name: sys.executable))
        if "world_size" not in more:
            stand_ins.enter_context(patch.object(ProcessGroupTransport, "start", to_itself))
        fields: dict[str, Any] = {"side": 32, "repeats": 1, "is_dry": True, "run": run}
        fields |= {"backend": "gloo", "beside": "gloo", "spans_of": spans_of} | more
        machine = Machine("cpu", compiler="aot_eager", **fields)
        return check(machine, Findings.of_folder(folder), parsed(words))


def main() -> int:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    status = checked(sys.argv[1:], Path("out"))
    time.sleep(0.2)  # Python aborts if it ends while gloo's threads let go of tensors
    return status


if __name__ == "__main__":
    raise SystemExit(main())
