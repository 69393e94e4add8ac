"""Machines that are measured, shown and compared, and what is shown meanwhile."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dtensor_ring.command.main import main
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.lab.calibrate import stopwatch
from dtensor_ring.lab.calibrate.calibrate import curves_of, mesh_of_hosts, numbers_of
from dtensor_ring.lab.calibrate.calibrate_kernels import (
    CalibratedProblem,
    TileSeries,
    kernel_points,
    mask_of_form,
    tile_series,
)
from dtensor_ring.lab.calibrate.calibrate_machine import BETWEEN, BYTES, INSIDE, link_points
from dtensor_ring.lab.calibrate.stopwatch import QUICK_EFFORT, Effort, Series, Stopwatch
from dtensor_ring.lab.machine import FORMS, Curve, KernelSpeed, Links, Machine
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.report import tracked, untracked
from parallel_plans.models import load
from tests.fake_cuda import fake_cuda
from tests.pool import Pool, on_ranks
from tests.scripts import run_script
from tests.test_public import ROOT

LINE = Curve.line(1e-5, 1e9)
LINKS = Links(LINE, LINE, LINE, LINE)
MACHINE = Machine(
    name="some",
    device="cpu",
    source="measured",
    ranks_per_host=2,
    memory=10**9,
    kernels=(KernelSpeed("cpu_flash", "float32", 64, "full", LINE, LINE),),
    gemm={"float32": 1e11},
    memory_rate=1e10,
    merge=LINE,
    pack=LINE,
    inside=LINKS,
    between=LINKS,
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The file of a machine."""
    path = tmp_path / "some.json"
    path.write_text(MACHINE.to_json())
    return path


# Matrices, tiles, messages and memory that a cache holds: large ones only take time.
SMALL = """
import runpy
from dtensor_ring.lab.calibrate import calibrate_kernels, calibrate_machine, stopwatch
calibrate_kernels.MATRIX, calibrate_kernels.ADDED = (64, 64), (2**12, 2**12)
calibrate_kernels.FOOTPRINT = stopwatch.PASSED = 2**12
calibrate_kernels.ROWS, calibrate_machine.BYTES = (16, 64), (2**10, 2**14)
runpy.run_module("dtensor_ring", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.repeats), 2])
def test_calibrate(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    options = "--quick", "--kernel", "reference", "--heads", "2,1", "--head-dim", "16"
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    first, *others = run_script(script, "calibrate", path, *options, ranks=ranks, cwd=ROOT)
    assert "ranks per host" in first.printed
    assert not any(x.printed for x in others), "rank 0 speaks for all"
    found = as_machine(path)
    size = max(ranks, 1)
    assert (found.name, found.device, found.ranks_per_host) == ("here", "cpu", size)
    assert [(x.kernel, x.form, x.heads, x.head_dim) for x in found.kernels] == [
        ("reference", form, heads, 16) for form in reversed(FORMS) for heads in (2, 1)
    ]
    assert found.host_waits, "a CPU computes what it launches"
    assert found.gemm.keys() == {"float32"}
    both = {"inside": "measured", "between": "those inside"}
    assert found.samples["links"] == (both if ranks else dict.fromkeys(both, "memory"))
    assert (found.hop > 0) == bool(ranks)
    assert found.element_rate > 0
    repeats = found.samples["reference full 2 heads of 16 forward"]["seconds"]
    assert all(len(x) == QUICK_EFFORT.repeats for x in repeats)
    # What they take may be anything: a loaded machine makes any call slow, and others fast.
    links = [f"{field.name} inside" for field in fields(Links) if ranks]
    assert {"merge", "pack", *links} <= found.samples.keys()


def test_show(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(load, ["calibrate", str(written), "--show"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split("  ")[0] for line in printed.splitlines()]
    assert {*(x for x, *_ in curves_of(MACHINE)), *numbers_of(MACHINE)} <= {*rows}
    assert re.search(r"matrix products float32 +100 GFLOP/s", printed)
    assert re.search(r"merge +0 B +10 us +1.1 TB +1.1e\+03 s +1 GB/s", printed)


def test_links_that_were_not_measured_have_no_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    links = {"inside": "measured", "between": "those inside"}
    path = tmp_path / "some.json"
    path.write_text(replace(MACHINE, samples={"links": links}).to_json())
    assert main(load, ["calibrate", str(path), "--show"]) == 0
    printed = capsys.readouterr().out
    assert "p2p inside" in printed
    assert "p2p between" not in printed
    assert "not measured: those inside hosts stand in" in printed


def test_compare(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = replace(MACHINE, name="slower", merge=Curve.line(3e-5, 1e9), memory_rate=5e9)
    other = tmp_path / "other.json"
    other.write_text(slower.to_json())
    assert main(load, ["calibrate", "--compare", str(written), str(other)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    ratios = {" ".join(row[:2]): row[-1] for row in rows}
    assert ratios["merge, 0"] == "3.00"
    assert ratios["memory rate"] == "0.50"
    assert ratios["pack, 0"] == "1.00"


def bad_files(folder: Path) -> dict[str, Path]:
    """Files that cannot be used."""
    content = json.loads(MACHINE.to_json())
    texts = {
        "good": MACHINE.to_json(),
        "schema": json.dumps(content | {"schema": 99}),
        "device": replace(MACHINE, device="NVIDIA H100 80GB HBM3").to_json(),
        "text": "not JSON",
        "config": json.dumps({"model_type": "llama", "hidden_size": 64}),
    }
    paths = {name: folder / f"{name}.json" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    return paths | {"none": folder / "none.json", "far": folder / "nowhere" / "far.json"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "calibrate needs the file"),
        ("--show {none}", "neither a file that can be read"),
        ("--show {text}", "is not JSON"),
        ("--show {schema}", "has schema 99, this version reads"),
        ("--show {good} --kernel flash_attn3", "no kernel 'flash_attn3', only cpu_flash"),
        ("--compare {good} {device}", "is of NVIDIA H100 80GB HBM3, not of cpu"),
        ("--compare {good} {schema}", "has schema 99"),
        ("{far}", "there is no folder"),
        ("{text} --quick", "is there, and is no file of a machine"),
        ("{config} --quick", "is there, and is no file of a machine"),
        ("{none} --kernel flash_attn3", "it runs on CUDA"),
        ("{none} --kernel nobodys", "unknown kernel 'nobodys'"),
        ("{none} --dtype int8", "not a floating dtype"),
        ("{none} --heads 8", "heads of queries and of keys"),
        ("{none} --heads 8,3", "must be a multiple"),
        ("{good} --show --compare {good} {good}", "--show or --compare, not both"),
    ],
)
def test_bad_input_is_one_line(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main(load, ["calibrate", *command.format(**bad_files(tmp_path)).split()])
    except SystemExit as error:
        status = error.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_bad_input_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    assert main(load, ["calibrate", str(path), "--kernel", "flash_attn3"]) == 2
    assert not path.exists()


def test_ranks_of_hosts(pool: Pool) -> None:
    for per_host in (1, 2, 4):
        pool.run(4, _check_hosts, per_host)
    pool.run(4, _check_uneven)


def _check_hosts(per_host: int) -> None:
    rank = dist.get_rank()
    with patch.object(dist, "get_node_local_rank", return_value=rank % per_host):
        mesh = mesh_of_hosts("cpu")
    first = rank // per_host * per_host
    assert dist.get_process_group_ranks(mesh.get_group(INSIDE)) == [*range(first, first + per_host)]
    assert dist.get_process_group_ranks(mesh.get_group(BETWEEN)) == [
        *range(rank % per_host, 4, per_host)
    ]


def _check_uneven() -> None:
    local_rank = [0, 1, 2, 0][dist.get_rank()]
    with (
        patch.object(dist, "get_node_local_rank", return_value=local_rank),
        pytest.raises(ValueError, match="got the local ranks 0, 1, 2, 0"),
    ):
        mesh_of_hosts("cpu")


def test_forms_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without windows has rows of the other forms, and the one of windows of all."""
    plain, windowed = KERNELS["cudnn"], KERNELS["cuda_flash"]
    device, problem = torch.device("cpu"), CalibratedProblem((2, 1), 8, torch.float32)
    for kernels, expected in (
        ([plain, windowed], [(plain, "full"), (plain, "causal")]),
        ([windowed], []),
    ):
        monkeypatch.setattr(CalibratedProblem, "kernels", lambda *_, found=kernels: found)
        expected += [(windowed, form) for form in ("full", "causal", "window")]
        assert problem.tiles(device) == expected


def test_head_dims_that_kernels_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each other one that is served, keys and values of latents too; FLOPs go by their mean."""
    device = torch.device("cpu")
    problem = CalibratedProblem((2, 1), 128, torch.float32, "reference")
    dims = [x.head_dims for x in problem.with_other_dims(device)]
    assert dims == [(64, 64), (96, 96), (192, 128), (256, 256)]
    latent = problem.with_other_dims(device)[2]
    assert [x.shape[3] for x in latent.tensors(4, device)] == [192, 128, 192, 128]
    tiles = tile_series(problem, [latent], device)
    series = [*kernel_points(tiles, device)]
    assert series[-1] == "reference window 2 heads of 192/128 backward"
    times = dict.fromkeys(series, Series((1.0, 2.0), ((1.0,), (2.0,))))
    last = tiles[-1].speed(times, 0.0)
    assert (last.head_dim, last.form, last.heads) == (160, "window", 2)
    # This one has one head dim for queries and values.
    one = problem._replace(kernel="cpu_flash").with_other_dims(device)
    assert (192, 128) not in [x.head_dims for x in one]


@pytest.mark.parametrize("value_dim", [None, 4])
def test_flops_of_tiles(value_dim: int | None) -> None:
    """FLOPs are those of visible pairs, counted one by one."""
    problem = CalibratedProblem((2, 1), 8, torch.float32, value_dim=value_dim)
    for form in FORMS:
        mask = mask_of_form(form, 64)
        seen = torch.ones(64, 64, dtype=torch.bool)
        if mask.right is not None:
            seen = seen.tril(mask.right)
        if mask.left is not None:
            seen = seen.triu(-mask.left)
        tensors = problem.tensors(64, torch.device("cpu"))
        tile = TileSeries(problem, Reference(), form).calls(tensors)
        numbers = 2 * sum(problem.head_dims)
        assert tile.flops == numbers * int(seen.sum()) * 2, form


class NamedMessages:
    """Messages whose calls tell their kind and size; p2p and all-to-all are waited for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, kind: str) -> Any:
        return lambda size: lambda: self.calls.append((kind, size)) or ()


def test_kinds_of_messages() -> None:
    """The points of a kind are made late, one by one, and are of this kind then."""
    messages: Any = NamedMessages()
    points = link_points(messages)
    assert [*points] == [x.name for x in fields(Links)]
    for kind, of in points.items():
        for (size, call), expected in zip(of, BYTES, strict=True):
            call()
            assert size == expected
            assert messages.calls.pop() == (kind if kind != "p2p" else "shift", expected)


@on_ranks(1)
def test_time_of_a_gpu() -> None:
    """Events time what the stream does, and the host is not asked to wait for each call."""
    with fake_cuda():
        watch = Stopwatch(torch.device("cuda"), Effort(repeats=3, shortest=1e-3, longest=1.0))
        counts = [0]

        def call() -> None:
            counts[0] += 1

        found = watch.measure({"some": [(1.0, call), (2.0, call)]})
        assert [len(x) for x in found["some"].seconds] == [3, 3]
        assert counts[0] > 2 * 3 * 100, "short calls are repeated"
        first, second = watch.laps(call, call)
        assert 0 <= first <= second


@on_ranks(1)
def test_a_series_stops_at_long_calls() -> None:
    now = [0.0]
    made = []

    def points() -> Any:
        for size in (1, 2, 4, 8):
            made.append(size)

            def call(size: int = size) -> None:
                now[0] += size

            yield float(size), call

    with patch.object(stopwatch.time, "perf_counter", lambda: now[0]):
        watch = Stopwatch(torch.device("cpu"), Effort(repeats=2, shortest=3.0, longest=3.0))
        found = watch.measure({"some": points(), "others": [(1.0, lambda: None)]})
    assert found["others"] == Series((1.0,), ((0.0, 0.0),))
    assert found["some"] == Series((1.0, 2.0, 4.0), ((1.0, 1.0), (2.0, 2.0), (4.0, 4.0)))
    assert made == [1, 2, 4], "a size that is not timed is not made"


# What long commands show while they run.


def test_progress_is_shown_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, as stdout has the result; elsewhere nothing is shown."""
    for is_terminal in (False, True):
        if is_terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
        assert list(tracked(range(3), "steps")) == [0, 1, 2]
        found = capsys.readouterr()
        assert not found.out
        assert ("steps" in found.err) == is_terminal
        assert list(untracked(range(3), "steps")) == [0, 1, 2]
        assert not capsys.readouterr().err
