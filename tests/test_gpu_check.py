"""The check of GPUs, dry: what a first run on one does, it has done before."""

from __future__ import annotations

import json
import operator
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dtensor_ring import register_kernel
from dtensor_ring.compute.kernels.registry import unregister_kernel
from parallel_plans import tested
from tests import dry_gpu_check, roofline
from tests.fake_cuda import Event, fake_cuda
from tests.intervals import OneLaunch
from tests.pool import Pool
from tests.scripts import run_script
from tests.test_public import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Those of the check, whose results go to a folder of the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    import gpu_check
    from gpu_steps import any_mask, findings, installed, machine, processes, skips, suite, traces

    return SimpleNamespace(
        **{"check": gpu_check, "findings": findings, "installed": installed, "skips": skips},
        **{"suite": suite, "machine": machine, "processes": processes, "traces": traces},
        any_mask=any_mask,
    )


def found_in(folder: Path) -> dict[str, dict[str, str]]:
    """What was found, by step and by what was looked at; nothing of it is wrong."""
    steps = json.loads((folder / "gpu.json").read_text())["steps"]
    rows = [(name, row) for name, step in steps.items() for row in step["findings"]]
    assert not [row for _, row in rows if row[3]], "is wrong"
    assert all(step["has_ended"] and step["findings"] for step in steps.values())
    return {name: {row[0]: row[1] for of, row in rows if of == name} for name in steps}


def test_every_step_runs(pool: Pool, modules: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("results")

    def run_ranks(world_size: int, function: Any, *given: Any, seconds: float) -> list[Any]:
        where = function.__module__, function.__name__
        return pool.run(world_size, dry_gpu_check.of_benchmarks, *where, *given)

    assert dry_gpu_check.checked(["--sanitize"], folder, run_ranks=run_ranks) == 0
    found = found_in(folder)
    assert list(found) == list(modules.check.ALONE)
    ways = ("eager", "autocast", "compiled", "without waiting", "CUDA graph, replayed")
    for way in ways:
        assert sum(f"public call, {way}" in what for what in found["public"]) == 2, (
            "with and without documents"
        )
    assert found["messages"]["message to itself, in a CUDA graph"] == "arrived"
    assert len(found["threads"]) == 2 * 4, "two kernels"
    assert len(found["processes"]) == 9
    assert len(found["eight_bits"]) == 1 + 2 * (6 + 1), "a copy; each format's speeds, and a ring"
    *bits, model = found["graphs"].values()
    assert [x.split()[0] for x in bits] == ["0", "0", "0"], "of tensors differ"
    assert model == "off by 0e+00"
    assert len(found["host"]) == 2
    assert len(found["bound"]) == 5
    assert len(found["masks"]) == 2 * (1 + 2) + 5, "causal and windows; rings"
    measured = json.loads((folder / "gpu.json").read_text())
    assert [row["torch"] is not None for row in measured["rows"]] == [True, False]
    assert all(len(row[what]) == 2 for row in measured["rows"] for what in ("single", "there"))
    assert (folder / "gpu.png").stat().st_size
    page = (folder / "gpu.md").read_text()
    assert page.index("## Wrong") < page.index("## Aims missed") < page.index("## Installed")
    capsys.readouterr()
    assert dry_gpu_check.checked(["--sanitize"], folder, run=None, run_ranks=None) == 0
    assert "to do  nothing" in capsys.readouterr().out, "each step has a result"
    assert json.loads((folder / "gpu.json").read_text())["steps"] == measured["steps"]


def test_masks_by_kernels_of_whole_steps(modules: Any) -> None:
    """One launch for each source of keys, and no other result than that of many; by name."""
    register_kernel(OneLaunch())  # behind cpu_flash, which serves all of it
    try:
        machine = modules.machine.Machine("cpu", side=32, repeats=1, is_dry=True)
        with fake_cuda():
            found = list(modules.any_mask.any_mask(machine))
    finally:
        unregister_kernel("one_launch")
    assert not [x for x in found if x.is_wrong]
    assert sum("next to cpu_flash" in x.what for x in found) == 4 + 5
    rings = [x for x in found if " 2 x 32, " in x.what and "launches" in x.found]
    numbers = [(x.what.split(",")[0], int(x.found.split()[-3])) for x in rings]
    assert [x for kernel, x in numbers if kernel == "one_launch"] == [2, 2, 4, 4, 4]
    assert [x for kernel, x in numbers if kernel == "cpu_flash"] == [16, 16, 49, 20, 5]


def test_serving_says_which_transformers_it_needs(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tested, "version", lambda library: "5.17.0")
    (found,) = modules.check.ALONE["serving"].take(modules.machine.Machine(is_dry=True))
    oldest = ".".join(map(str, tested.TESTED["transformers"].oldest))
    assert found.found.startswith(f"left out: it needs transformers {oldest} or later, found 5.17")
    assert not found.is_wrong
    monkeypatch.setattr(tested, "version", lambda library: f"{oldest}.0")
    assert tested.too_old("transformers") is None


def test_every_step_of_several_ranks(pool: Pool, modules: Any, tmp_path: Path) -> None:
    assert pool.run(2, dry_gpu_check.together, [], str(tmp_path)) == [0, 0]
    found = found_in(tmp_path)
    assert list(found) == list(modules.check.TOGETHER)
    assert len(found["right"]) == 8
    assert found["differing"] == {"2 ranks, another mask on one rank": "every rank was told"}
    assert len(found["speed"]) == 5, "three strategies of ours, and two rings of PyTorch"
    assert len(found["agreement"]) == 3
    assert {*found["hops"].values()} == {"200.000 ms, of which 50% is exposed"}


def test_as_a_script(tmp_path: Path) -> None:
    """It finds what it imports, and lists its steps without a GPU."""
    (done,) = run_script(BENCHMARKS / "gpu_check.py", "--dry-run", cwd=tmp_path)
    lines = done.printed.splitlines()
    assert len(lines) == 2 + 17 + 5
    assert lines[1] == "  installed     5 s  versions, and kernels that run"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(
    modules: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert modules.check.main() == 2
    assert capsys.readouterr().out == (
        "gpu_check needs a CUDA device, and torch sees none: torch.cuda.is_available() is False\n"
    )


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


class Steps:
    """Steps to take, which note each time that they are taken."""

    def __init__(self, modules: Any) -> None:
        self._modules, self.finding = modules, modules.machine.Finding
        self.taken: list[str] = []
        self.kept: list[bool] = []
        """Whether each row was in the file before the step went on."""
        self.rows = {"first": [self.finding("speed", "80", aim="90")], "second": []}
        self.synchronize: Any = lambda: None

    def run(self, *words: str) -> int:
        """Take the steps of a new run, in the folder of the runs before."""
        check, machine = self._modules.check, self._modules.machine.Machine(is_dry=True)
        planned = {name: check.Planned("", 9, self._step(name)) for name in self.rows}
        findings = self._modules.findings.Findings.of_folder(Path("found"))
        options = SimpleNamespace(only=[], again="--again" in words, sanitize=False)
        with (
            patch.object(check, "ALONE", planned),
            fake_cuda(),
            patch.object(torch.cuda, "synchronize", self.synchronize),
        ):
            return check.check(machine, findings, options)

    def _step(self, name: str) -> Any:
        def step(machine: Any) -> Iterator[Any]:
            self.taken.append(name)
            for row in self.rows[name]:
                if isinstance(row, Exception):
                    raise row
                if row.what not in machine.found:
                    yield row
                    self.kept.append(row.what in Path("found/gpu.json").read_text())

        return step


def test_a_step_that_fails_is_taken_again_after_the_others(modules: Any) -> None:
    steps = Steps(modules)
    assert steps.run() == 0, "to be slow is no fault"
    steps = Steps(modules)
    steps.rows = {
        "third": [steps.finding("a row", "fine"), RuntimeError("no more")],
        "fourth": [steps.finding("one", "1"), modules.machine.left_out("two")],
    }
    assert steps.run() == 1
    assert steps.kept == [True] * 3, "a process that is killed loses nothing"
    text = Path("found/gpu.md").read_text()
    assert "- third: the step ended early: RuntimeError: no more" in text
    assert "- first: speed: 80; aim: 90" in text, "that of the run before"
    assert "## Fourth, not finished" in text
    steps.rows["fifth"] = [steps.finding("last", "1")]
    steps.rows["third"] = [steps.finding("a row", "other"), steps.finding("more", "fine")]
    steps.rows["fourth"] = [steps.finding("one", "3"), steps.finding("two", "2")]
    steps.taken = []
    assert steps.run() == 0
    assert steps.taken == ["fifth", "third", "fourth"]
    kept = json.loads(Path("found/gpu.json").read_text())["steps"]
    assert kept.keys() == {*steps.rows, "first", "second"}
    text = Path("found/gpu.md").read_text()
    assert "- a row: fine\n- more: fine" in text, "what was right is not looked for again"
    assert "- one: 1\n- two: 2" in text
    steps.taken = []
    steps.run()
    assert not steps.taken
    steps.run("--again")
    assert steps.taken == ["third", "fourth", "fifth"]


@pytest.mark.parametrize("again", [False, True])
def test_rows_of_the_card_are_measured_again_on_request(again: bool, modules: Any) -> None:
    check, findings = modules.check, modules.findings.Findings.of_folder(Path("found"))
    findings.card.rows = ["a row"]
    report = check.Report(modules.machine.Machine(), findings)
    with (
        fake_cuda(),
        patch.object(check.Card, "__call__", lambda card, machine: iter(())),
        patch.object(findings, "keep"),
    ):
        assert report.run("card", check.ALONE["card"], again)
    assert findings.card.rows == ([] if again else ["a row"])


def test_a_kernel_that_writes_past_its_memory(modules: Any) -> None:
    """Nothing runs in that process any more: the next run has the other steps, and then this."""
    steps = Steps(modules)

    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    steps.synchronize = lost
    assert steps.run() == 1
    assert steps.taken == ["first"]
    assert "this process lost its GPU: an illegal" in Path("found/gpu.md").read_text()
    steps = Steps(modules)
    assert steps.run() == 0
    assert steps.taken == ["second", "first"]


def test_a_step_that_hangs(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is kept, and the process ends; the next run takes another step first."""

    def exits(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(modules.check.os, "_exit", exits)
    monkeypatch.setattr(modules.check.faulthandler, "dump_traceback", lambda: None)
    findings = modules.findings.Findings.of_folder(Path("found"))
    report = modules.check.Report(modules.machine.Machine(is_dry=True), findings)

    def hangs(machine: Any) -> Iterator[Any]:
        yield modules.machine.Finding("a row", "fine")
        report.give_up("slow")

    with fake_cuda(), pytest.raises(SystemExit, match="1"):
        report.run("slow", modules.check.Planned("", 9, hangs))
    again = modules.findings.Findings.of_folder(Path("elsewhere"), Path("found"))
    assert again.is_wrong
    assert not again.steps["slow"].is_done
    assert list(again.steps["slow"].begun_again(False).findings) == ["a row"]


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


def test_ranks_are_processes(modules: Any) -> None:
    assert modules.processes.run_ranks(1, operator.add, 1, 2, seconds=60) == [3]
    with pytest.raises(TimeoutError, match="no end after 0 s"):
        modules.processes.run_ranks(1, time.sleep, 60, seconds=0.1)


@pytest.mark.parametrize(
    ("shard", "ours", "missed"),
    [
        (8192, (0.96, 0.97), ""),
        (8192, (0.94, 0.97), "95%"),
        (2048, (0.94, 0.95), ""),
        (2048, (0.85, 0.95), "torch's, 90.0%"),
        (8192, (0.85, 0.90), "torch's, 90.0%, 95%, 96%"),
    ],
)
def test_aims_of_several_ranks(
    shard: int, ours: tuple[float, float], missed: str, modules: Any
) -> None:
    from gpu_steps import over_ranks

    assert over_ranks._missed(SimpleNamespace(shard=shard), ours, [0.9, 0.8]) == missed


def test_the_bound_stands_beside_that_of_published_speeds(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_steps.bound import published

    monkeypatch.setattr(roofline, "bound", lambda gpu, parts, stages: 0.9 + 0.01 * stages)
    ring = SimpleNamespace(world_size=8, shard=8192, kernel="flash_attn4")
    assert published("NVIDIA B200", ring, 8) == "; published speeds leave 91.0%"
    ring.kernel = "cuda_flash"
    said = "; published speeds leave 91.0% and 92.0%"
    assert published("NVIDIA H100 80GB HBM3", ring, 8) == said
    assert published("NVIDIA B200", ring, 8) == "", "nobody published that"
    ring.shard = 4096
    assert published("NVIDIA H100 80GB HBM3", ring, 8) == ""


class TestTraces:
    """Spans of a GPU: two kernels with a message between and beside them."""

    @pytest.fixture
    def spans(self, modules: Any) -> list[Any]:
        times = {
            "void at::native::vectorized_elementwise_kernel": (0, 1),
            "flash_bwd_dq": (1, 3),
            "ncclDevKernel_SendRecv": (2.5, 5),
            "_accumulate_sums": (4, 4.5),
            "triton_poi_fused": (7, 8),
        }
        return [modules.traces.KernelSpan(name, *at) for name, at in times.items()]

    def test_what_is_exposed(self, spans: list[Any], modules: Any) -> None:
        others = [span for span in spans if span.kind != "messages"]
        covers = modules.traces.joined(others)
        assert covers == [(0, 3), (4, 4.5), (7, 8)]
        assert [modules.traces.exposed(span, covers) for span in spans] == [0, 0, 1.5, 0, 0]

    def test_kinds(self, spans: list[Any], modules: Any) -> None:
        assert modules.traces.seconds_by_kind(spans) == {
            **{"messages": 2.5, "attention": 2, "idle": 2},
            **{"copies and sums": 1, "other kernels": 1, "merges": 0.5},
        }
        assert modules.traces.seconds_by_kind([]) == {}

    def test_those_of_a_device(self, modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """By their start; without those of the host, and without its annotations."""
        device, host = modules.traces.DeviceType.CUDA, modules.traces.DeviceType.CPU
        events = [
            SimpleNamespace(
                name=name,
                device_type=where,
                is_user_annotation=name == "step",
                time_range=SimpleNamespace(start=start, end=start + 1e6),
            )
            for name, where, start in (("b", device, 3e6), ("a", device, 1e6), ("x", host, 0))
        ]
        annotation = {"name": "step", "is_user_annotation": True}
        events.append(SimpleNamespace(**vars(events[0]) | annotation))

        class Profile:
            def __init__(self, activities: Any) -> None:
                assert len(activities) == 2

            def __enter__(self) -> Any:
                return SimpleNamespace(events=lambda: events)

            def __exit__(self, *error: object) -> None:
                ran.append("stopped")

        ran: list[str] = []
        monkeypatch.setattr(modules.traces, "profile", Profile)
        with fake_cuda():
            found = modules.traces.spans_of(lambda: ran.append("ran"))
        assert ran == ["stopped", "ran", "stopped"], "the tracer had started before"
        assert found == [("a", 1.0, 2.0), ("b", 3.0, 4.0)]


def test_what_is_left_out(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not installed is named, with what needs it, and nothing is loaded for that."""
    skips = modules.skips
    tests = {str(path.relative_to(ROOT)): path for path in skips.gpu_tests()}
    there = skips.missing_packages(tests["tests/test_played.py"])
    assert not there
    absent = {"hypothesis", "matplotlib"}
    monkeypatch.setattr(skips, "find_spec", lambda name: None if name in absent else name)
    skips.missing_packages.cache_clear()
    said = list(skips.skips())
    skips.missing_packages.cache_clear()
    assert "the picture of the card: matplotlib is not installed" in said
    assert "tests/test_played.py: without hypothesis" in said
    assert not [line for line in said if "test_kernels.py" in line], "it does not import it"
    monkeypatch.setattr(skips, "version", lambda name: "8.4.1")
    assert "step tests: pytest 8.4.1 is installed, and 9 is needed" in list(skips.skips())
    found = list(modules.suite.suite(modules.machine.Machine()))
    assert [x.found for x in found] == ["left out: pytest 8.4.1 is installed, and 9 is needed"]
