"""The check of GPUs, dry: what a first run on one does, it has done before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.fake_cuda import Event, fake_cuda
from tests.test_public import ROOT

BENCHMARKS = ROOT / "benchmarks"
STEPS = ["installed", "public", "messages", "bandwidth", "tiles", "card", "tests", "sanitizer"]


def test_every_step_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.dry_gpu_check"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "out" / "gpu.json").read_text())
    findings = measured["findings"]
    assert list(findings) == STEPS
    assert all(findings.values()), "each found something"
    reported = {what: found for step in findings.values() for what, found, _, _ in step}
    ways = ("eager", "autocast", "compiled", "without waiting", "CUDA graph, replayed")
    for way in ways:
        assert sum(f"public call, {way}" in what for what in reported) == 2, (
            "with and without documents"
        )
    assert reported["message to itself, in a CUDA graph"] == "arrived"
    rows = measured["rows"]
    assert [row["torch"] is not None for row in rows] == [True, False]
    assert all(len(row[what]) == 2 for row in rows for what in ("single", "ours", "there"))
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "## Wrong" in text
    assert "## Short of an aim" in text
    assert (tmp_path / "out" / "gpu.png").stat().st_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    command = [sys.executable, BENCHMARKS / "gpu_check.py"]
    done = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == (
        "gpu_check needs a CUDA device, and torch sees none: torch.cuda.is_available() is False\n"
    )


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Those of the check, whose results go to a folder of the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    import gpu_check
    from gpu_steps import installed, machine

    return SimpleNamespace(check=gpu_check, installed=installed, machine=machine)


@pytest.mark.parametrize(
    ("reason", "expected", "is_wrong"),
    [
        (None, (), False),
        ("the flash-attn-4 package is not installed", (), False),
        ("the flash-attn-4 package is not installed", ("flash_attn4",), True),
        ("it needs compute capability 9.x, this GPU has 8.0", (), False),
        ("the flash-attn-4 package does not load: no cutlass", (), True),
        ("its function takes no return_lse: flash-attn has overwritten it", (), True),
    ],
)
def test_an_expected_kernel_that_does_not_load(
    reason: str | None,
    expected: tuple[str, ...],
    is_wrong: bool,
    modules: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modules.installed, "available_kernels", lambda: {"flash_attn4": reason})
    found = list(modules.installed.installed(modules.machine.Machine(expected=expected)))
    assert found[-1].found == (reason or "runs")
    assert [x.is_wrong for x in found] == [False] * (len(found) - 1) + [is_wrong]


def test_a_step_that_fails_or_hangs(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others run all the same, what was found is kept, and the status says that it is wrong."""
    machine, finding = modules.machine.Machine(is_dry=True), modules.machine.Finding

    def fails(machine: Any) -> Iterator[Any]:
        yield finding("a row", "fine")
        raise RuntimeError("no more")

    def exits(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(modules.check.os, "_exit", exits)
    monkeypatch.setattr(modules.check.faulthandler, "dump_traceback", lambda: None)
    report = modules.check.Report(machine, is_part=True)
    with fake_cuda():
        report.run("first", lambda machine: iter([finding("speed", "80", aim="90")]))
        assert not report.is_wrong, "to be slow is no fault"
        report.run("second", fails)
        assert report.is_wrong
        with pytest.raises(SystemExit, match="1"):
            report.give_up()
    text = Path("out/gpu.md").read_text()
    assert "- second: the step ended early: RuntimeError: no more" in text
    assert "- second: the step ended early: it took too long" in text
    assert "- first: speed: 80; the aim is 90" in text


def test_the_clock_starts_behind_a_running_kernel(modules: Any) -> None:
    """So the host's time to the first launch is none of the GPU's."""
    from gpu_steps.alone import median_seconds, seconds_of

    reported: list[str] = []
    stages = [lambda: reported.append("forward"), lambda: reported.append("backward")]
    with fake_cuda():
        median_seconds(lambda: None, 1)  # measures the clock
        with (
            patch.object(torch.cuda, "_sleep", lambda cycles: reported.append("sleep")),
            patch.object(Event, "record", lambda event: reported.append("record")),
        ):
            seconds_of(stages)
    assert reported == ["sleep", "record", "forward", "record", "backward", "record"]


def test_commands_end_in_time(modules: Any) -> None:
    status, text = modules.machine.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    assert status != 0
    assert "no end after" in text
    assert modules.machine.run([sys.executable, "-c", "print(1)"], 60) == (0, "1\n")
