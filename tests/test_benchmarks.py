"""Benchmarks that can run anywhere do, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.test_public import ROOT


def test_benchmark_of_the_loss(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "loss.py", "--quick"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300, capture_output=True)
    costs = json.loads((tmp_path / "out" / "loss.json").read_text())["costs"]
    assert [cost["name"] for cost in costs[:2]] == ["whole logits", "ours"]
    assert all(len(cost["both"]) == 2 for cost in costs)
    assert costs[0]["logits"] > 1, "they were counted"


def test_benchmark_of_decoding(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "decode.py", "--quick"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300, capture_output=True)
    measurements = json.loads((tmp_path / "out" / "decode.json").read_text())["measurements"]
    assert [m["case"]["world_size"] for m in measurements] == [2, 2]
    assert all(len(times) == 5 for m in measurements for times in m["seconds"].values())


def test_benchmark_of_generation(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "generate.py", "--quick"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300, capture_output=True)
    (found,) = json.loads((tmp_path / "out" / "generate.json").read_text())["measurements"]
    names = {"1 process", "2 ranks"}
    assert found["first"].keys() == found["steps"].keys() == found["cache_bytes"].keys() == names


def test_benchmark_of_frames(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "frames.py", "--quick"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300, capture_output=True)
    counts = json.loads((tmp_path / "out" / "frames.json").read_text())["counts"]
    assert len(counts) == 9
    for count in counts:
        assert count["calls"] == sum(count["by_file"].values()) > 0
        has_kernel = not count["name"].startswith("sum_over_sequence")
        assert (count["at_kernel"] > 0) == has_kernel
