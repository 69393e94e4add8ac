"""Kernels for GPUs give what plain PyTorch gives, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.test_public import ROOT


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("options", [(), pytest.param(("--all",), marks=pytest.mark.repeats)])
def test_kernels(options: tuple[str, ...]) -> None:
    """In a process of its own: Triton reads the setting when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    flags = ["-W", "error", "-X", "faulthandler"]  # a wrong address ends the process
    command = [sys.executable, *flags, "-m", "tests.interpreted", *options]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=300)
