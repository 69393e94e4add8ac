"""The benchmark of a GPU runs without one, small, so that it runs where there is one."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.test_public import ROOT


def test_gpu_benchmark() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--quick"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True)
    about = json.loads((ROOT / "out" / "gpu.json").read_text())["about"]
    assert not [what for what in about if what.startswith("failed")]
    rows = json.loads((ROOT / "out" / "gpu.json").read_text())["rows"]
    assert len(rows) == 2
    for row in rows:
        assert len(row["single"]) == len(row["ours"]) == 2, "forward, and with backward"
        assert 0 < row["merges"] < 1
    assert [row["torch"] is not None for row in rows] == [True, False]
    assert (ROOT / "out" / "gpu.png").stat().st_size
