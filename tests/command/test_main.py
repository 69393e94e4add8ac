"""Commands: what they print, and what they return."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import dtensor_ring
from dtensor_ring import Mask, compare_strategies, describe_schedule
from dtensor_ring.command.main import main
from dtensor_ring.lab.report import Finding
from dtensor_ring.states.hybrid import Hybrid, compare_hybrid_layouts
from parallel_plans.models import load, read_config
from tests.forced import machine_for
from tests.lab.machines import round_machine
from tests.scripts import run_launcher, run_script
from tests.test_public import ROOT

TORCHRUN = "torch.distributed.run", "--standalone", "--nproc-per-node", "2"


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ((), ("zigzag", Mask.causal(), 1024, 4)),
        (("--mask", "full", "--layout", "contiguous"), ("contiguous", Mask.full(), 1024, 4)),
        (("--mask", "sliding:1_00"), ("zigzag", Mask.sliding(100), 1024, 4)),
        (("--mask", "chunked:256"), ("zigzag", Mask.chunked(256), 1024, 4)),
        (("--cu-seqlens", "0,24,1024"), ("zigzag", Mask.causal(), 1024, 4, [0, 24, 1024])),
        (("--strategy", "ulysses:2"), ("zigzag", Mask.causal(), 1024, 4, None, None, "ulysses:2")),
    ],
)
def test_schedule(
    options: tuple[str, ...], asked: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["schedule", "--seq-len", "1024", "--world-size", "4", *options]
    expected = describe_schedule(*asked)
    assert main(load, command) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(load, [*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["areas"] == expected.areas
    assert found["received"] == expected.received


@pytest.mark.parametrize("argument", ["--help", "compare --help", "--version", "compare --mask no"])
def test_help_and_mistakes_need_no_torch(argument: str) -> None:
    """Torch takes seconds to import; `-X importtime` lists what is imported on stderr."""
    command = [sys.executable, "-X", "importtime", "-m", "dtensor_ring", *argument.split()]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=90
    )
    imported = [x.rpartition("|")[2].strip() for x in ended.stderr.splitlines() if "|" in x]
    assert "dtensor_ring.command.parser" in imported
    assert "torch" not in imported
    assert ended.returncode == 2 * ("no" in argument)


def test_a_program_of_another_name_is_not_parsed() -> None:
    """It imports the package, and its arguments are its own."""
    run_script("tests.command.imports_it", "dtensor_ring", "--help", cwd=ROOT)


def test_schedule_of_the_fastest_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the machine of a file, for these heads."""
    path = tmp_path / "machine.json"
    path.write_text(machine_for("ulysses").to_json())
    asked = ("zigzag", Mask.causal(), 1024, 4, None, None)
    command = ["schedule", "--seq-len", "1024", "--world-size", "4", "--strategy", "auto"]
    command += ["--machine", str(path), "--heads"]
    for heads, expected in (("4,2", "ulysses:4"), ("2,1", "ulysses:2")):
        assert main(load, [*command, heads]) == 0
        assert capsys.readouterr().out == f"{describe_schedule(*asked, expected)}\n"


HYBRID = Hybrid(3, 1, 64, heads=(8, 2), head_dim=16, maps=(3 * 100 * 4, 0))


@pytest.mark.parametrize("command", ["schedule", "compare"])
def test_layouts_of_a_hybrid(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    how = f"{command} --seq-len 1024 --world-size 4 --heads 8,2 --head-dim 16".split()
    expected = compare_hybrid_layouts(HYBRID, Mask.causal(), 1024, 4)
    given = [*how, "--hybrid", "3,1,64,100"]
    assert main(load, given) == 0
    assert capsys.readouterr().out.endswith(f"\n{expected}\n")
    assert main(load, [*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layouts"] == [asdict(row) for row in expected.rows]
    assert main(load, [*how, "--json"]) == 0
    assert "layouts" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", ["schedule", "compare"])
def test_layouts_of_a_config(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As the plan compares them: the numbers of docs/huggingface.md, from 8,240 tokens on."""
    for seq_len, is_exchanged in ((8232, True), (8240, False)):
        how = f"{command} --seq-len {seq_len} --world-size 4 --hybrid qwen3_next --json"
        assert main(load, how.split(), read=read_config) == 0
        rows = json.loads(capsys.readouterr().out)["layouts"]
        [zigzag] = [row for row in rows if row["layout"] == "zigzag"]
        assert (zigzag["relayouts"] > 0) == is_exchanged


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(load, ["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dtensor-ring {dtensor_ring.__version__}\n"


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare --seq-len 1024 --world-size 4 --mask sliding:100 --heads 8,2 --head-dim 64"
    command += " --max-held 1000000"
    expected = compare_strategies(Mask.sliding(100), 1024, 4, (8, 2), 64, max_held=10**6)
    assert {row.why_not is None for row in expected.rows} == {True, False}
    assert main(load, command.split()) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(load, [*command.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["strategy"] for row in found] == [row.strategy for row in expected.rows]
    assert found[0]["forward"]["sent"] == expected.rows[0].forward.sent


def test_compare_on_a_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(round_machine().to_json())
    expected = compare_strategies(Mask.causal(), 1024, 4, machine=path)
    command = [
        "compare",
        *["--seq-len", "1024", "--world-size", "4", "--mask", "causal", "--machine"],
    ]
    assert main(load, [*command, str(path)]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(load, [*command, str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [tuple(row["seconds"]) for row in rows] == [row.seconds for row in expected.rows]


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("", 2, "the following arguments are required: command"),
        ("schedul", 2, "invalid choice: 'schedul'"),
        ("schedule --seq-len 8", 2, "required: --world-size"),
        ("schedule --seq-len 8 --world-size 2 --hybrid 3,1", 2, "layers with a state, layers with"),
        ("schedule --seq-len 8 --world-size 0", 2, "'0' is not a positive number"),
        ("compare --seq-len 8 --world-size 2 --hybrid 3,1", 2, "or give a config.json"),
        ("compare --seq-len 8 --world-size 2 --hybrid no.json", 2, "cannot be read: No such file"),
        ("compare --seq-len 8 --world-size 2 --machine no.json", 2, "machine 'no.json' is neither"),
        ("schedule --seq-len 8 --world-size 2 --mask slid:4", 2, "sliding:<tokens before"),
        ("schedule --seq-len 8 --world-size 2 --cu-seqlens 0;8", 2, "numbers with commas"),
        ("schedule --seq-len 8 --world-size 2 --layout zag", 2, "unknown layout 'zag'"),
        ("schedule --seq-len 8 --world-size 2 --cu-seqlens 4,8", 2, "cu_seqlens"),
        ("schedule --seq-len 8 --world-size 4 --strategy ulysses:3", 2, "do not divide the 4"),
        ("schedule --seq-len 8 --world-size 4 --strategy ulises", 2, "known strategies: ring"),
        ("schedule --seq-len 8 --world-size 4 --strategy auto --machine h1", 2, "nor one of a100"),
        ("compare --seq-len 8 --world-size 2 --heads 8", 2, "heads of queries and of keys"),
        ("compare --seq-len 8 --world-size 2 --heads 8,3", 2, "must be a multiple"),
        ("doctor --fix", 2, "unrecognized arguments: --fix; python -m dtensor_ring doctor --help"),
        ("--fix doctor", 2, "unrecognized arguments: --fix; python -m dtensor_ring --help"),
        ("estimate --model x --seq-len 8 --mesh dp=2,dp_shard=2", 2, "each once with its number"),
        ("estimate --model x --seq-len 8 --mesh cp=8,tp=2", 2, "tp out, a rank has less with it"),
        (f"estimate --model x --seq-len {10**20} --mesh cp=8", 2, "is not a positive number up to"),
        ("compare --seq-len 8 --world-size 2 --heads 0,0", 2, "heads of queries and of keys"),
        ("estimate --model x --seq-len 8 --mesh cp=8 --checkpoint some", 2, "'attention', 'full'"),
        ("estimate --model x --mesh cp=8", 2, "needs --seq-len, the tokens of a sequence"),
        ("estimate --model x --longest --mesh cp=8 --memory 0", 2, "'0' is not a number of GiB"),
        ("estimate --model x --seq-len 8 --mesh cp=2 --dtype int8", 2, "not a floating dtype"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    command: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found: Any = main(load, command.split())
    except SystemExit as error:
        found = error.code
    assert found == status
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("kernel", [None, "flash_attn2", "nobody's"])
def test_doctor_without_a_launcher(kernel: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kernel", kernel] if kernel else []
    assert main(load, ["doctor", "--json", *options]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    is_bad = [what for what, row in found.items() if row["is_bad"]]
    assert is_bad == [f"kernel {kernel}"] * (kernel is not None)
    if kernel != "nobody's":
        assert found["paged kernel in_place"]["found"] == "runs"
        assert found["kernel of lists flash_attn4"]["found"] == "no CUDA device"
    (line,) = printed.err.splitlines()
    assert "torchrun" in line
    assert main(load, ["doctor", *options]) == 1
    assert "torchrun" in capsys.readouterr().out


def test_doctor_says_how_to_choose_what_nobody_has_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dtensor_ring.command import doctor as self_test

    monkeypatch.setattr(self_test, "available_kernels", lambda: {"cudnn_flex": None, "cudnn": None})
    found = {x.what: x for x in self_test._kernels(None)}
    assert found["kernel cudnn"] == Finding("kernel cudnn", "runs")
    flex = found["kernel cudnn_flex"]
    assert flex.found == "installed; nobody has measured it, so others come first"
    assert flex.advice.startswith('kernel="cudnn_flex" asks for it; prefer_measured takes it')


def test_doctor_of_two_ranks() -> None:
    first, _ = run_script("dtensor_ring", "doctor", "--json", ranks=2, cwd=ROOT)
    found = json.loads(first.printed)
    assert found["ranks"]["found"].startswith("2 on ")
    assert {"ring, causal", "ring, window", "overlap"} <= found.keys()
    assert not any(row["is_bad"] for row in found.values())


def test_doctor_of_a_kernel_that_is_not_there_leaves_nothing_behind() -> None:
    doctor = "dtensor_ring", "doctor", "--kernel", "flash_attn2"
    run = run_launcher(*TORCHRUN, "-m", *doctor, cwd=ROOT, env={"COLUMNS": "200"}, timeout=120)
    assert run.code != 0
    assert "wrong" in run.printed
    assert "kernel flash_attn2" in run.printed
    assert not run.left


def test_doctor_finds_a_wrong_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtensor_ring.command import doctor as self_test

    ring = self_test.ring_attention
    monkeypatch.setattr(self_test, "ring_attention", lambda *x, **y: 1.01 * ring(*x, **y))
    store = self_test.torch.distributed.HashStore()
    start = self_test.torch.distributed.init_process_group
    alone = {"store": store, "rank": 0, "world_size": 1}
    monkeypatch.setattr(
        self_test.torch.distributed,
        "init_process_group",
        lambda backend, timeout: start(backend, timeout=timeout, **alone),
    )
    found = {x.what: x.is_bad for x in self_test.self_test(None)}
    assert found == {"ranks": False, "ring, causal": True, "ring, window": True}
