"""Runs `benchmarks/gpu_check.py` on a CPU, with stand-ins: `python -m tests.dry_gpu_check`.

Its results go to the folder `out`, and its status is that of the check.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dtensor_ring.transport.transport import P2P, ProcessGroupTransport
from tests.fake_cuda import fake_cuda

ROOT = Path(__file__).parent.parent
PYTEST_OPTIONS = ("-m", "-q", "-k", "--tool", "--error-exitcode")


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


def main(**more: Any) -> int:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu_check import check
    from gpu_steps.machine import Machine

    with (
        fake_cuda(),
        patch.object(ProcessGroupTransport, "start", to_itself),
        patch("shutil.which", lambda name: sys.executable),
    ):
        machine = Machine("cpu", "gloo", "aot_eager", side=64, repeats=1, is_dry=True, run=run)
        status = check(machine, sanitize=True)
    time.sleep(0.2)  # Python aborts if it ends while gloo's threads let go of tensors
    return status


if __name__ == "__main__":
    raise SystemExit(main())
