"""The command `simulate`: what it prints and draws, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from dtensor_ring.command.main import main
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training import simulate
from dtensor_ring.lab.training.collectives import COMPUTE
from dtensor_ring.lab.training.simulate import step_page
from dtensor_ring.lab.training.step import simulate_step, step_trace
from dtensor_ring.lab.training.step_sweep import sweep_steps
from parallel_plans.models import load, read_config

CONFIG = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMAND = "simulate --model {} --seq-len 8192 --mesh dp=2,cp=4"
MESH = {"dp": 2, "cp": 4}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(autouse=True)
def _small_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of winners have two rows and two columns."""
    monkeypatch.setattr(simulate, "MAP_TOKENS", (1024, 8192))
    monkeypatch.setattr(simulate, "MAP_RATES", (25e9, 400e9))


def _run(command: str, path: Path, *more: str) -> int:
    return main(load, [*command.format(path).split(), *more], read=read_config)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ("", {}),
        ("--machine b200 --dtype float8_e4m3fn", {"machine": "b200", "dtype": "float8_e4m3fn"}),
        ("--strategy ulysses:2 --layout contiguous --batch 2 --checkpoint full --world-size 8",
         {"strategy": "ulysses:2", "layout": "contiguous", "batch": 2, "checkpoint": "full"}),
        ("--cu-seqlens 0,1000,8192 --kernel cudnn",
         {"batches": [[0, 1000, 8192]] * 2, "kernel": "cudnn"}),
    ],
)  # fmt: skip
def test_a_step(
    options: str, asked: dict[str, Any], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = simulate_step(CONFIG, 8192, MESH, **({"machine": "h100"} | asked))
    assert _run(f"{COMMAND} {options}", config) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert _run(f"{COMMAND} {options} --json", config.parent) == 0
    assert json.loads(capsys.readouterr().out) == expected.as_json()


def test_a_sweep(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"{COMMAND} --sweep cp=2,4 strategy=all"
    swept = {"cp": [2, 4], "strategy": ["all"]}
    expected = sweep_steps(swept, config=CONFIG, seq_len=8192, mesh=MESH)
    assert _run(command, config) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert _run(f"{command} --json", config) == 0
    assert json.loads(capsys.readouterr().out) == [row.as_json() for row in expected.rows]


def test_names_are_read_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    """A model type stands for its default sizes; a file lacks defaults, which transformers has."""
    assert _run(COMMAND.format("gemma3_text") + " --json", Path()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found["attentions"]] == ["left 4095, right 0, 8 heads", "right 0, 8 heads"]


def test_files_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3_text", "num_hidden_layers": 2}))
    assert read_config(str(tmp_path))["sliding_window"] == 4096
    path.write_text(json.dumps({"hidden_size": 8}))
    assert read_config(str(path)) == {"hidden_size": 8}
    with patch.dict("sys.modules", {"transformers": None}):
        path.write_text(json.dumps(CONFIG))
        assert read_config(str(path)) == CONFIG
        with pytest.raises(ImportError, match="the name llama needs transformers"):
            read_config("llama")


def test_a_trace(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert _run(f"{COMMAND} --trace {path}", config) == 0
    events = json.loads(path.read_text())["traceEvents"]
    step = simulate_step(CONFIG, 8192, MESH)
    assert events == json.loads(json.dumps(step_trace(step)["traceEvents"]))
    spans = [x for x in events if x["ph"] == "X" and x["pid"] == 0]
    kernels = sum(x["dur"] for x in spans if x["tid"] == COMPUTE)
    parts = sum(step.parts[x] for x in ("attention", "ring", "gemm", "others", "loss"))
    assert kernels >= 1e6 * parts * (1 - 1e-9)  # some are slower beside a collective
    names = [x["args"]["name"] for x in events if x["name"] == "process_name"]
    assert names == ["llama, ring", *(f"attention, right 0, 4 heads, rank {i}" for i in range(4))]


def test_pages(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "step.html"
    assert _run(f"{COMMAND} --html {path}", config) == 0
    text = path.read_text()
    for name in ("parts", "step", "attention0"):
        assert f'id="{name}"' in text
    assert "rank 3 receive" in text
    assert _run(f"{COMMAND} --sweep cp=2 --html {path}", config) == 0
    assert 'id="winners"' in path.read_text()
    assert "of a link inside hosts" in path.read_text()


def test_a_picture_of_winners(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "winners.png"
    assert _run(f"{COMMAND} --sweep cp=2 --png {path}", config) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_many_ranks_are_not_drawn() -> None:
    pytest.importorskip("plotly")
    page = step_page(simulate_step(CONFIG, 2**12, {"cp": 128}))
    assert 'id="step"' in page
    assert 'id="attention0"' not in page


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--mesh dp=2,cp", "'dp=2,cp' is not a mesh, such as cp=8 or dp=4,cp=8"),
        ("--mesh dp=2,dp=2", "is not a mesh"),
        ("--mesh dp=2,pp=2", "axes are dp_replicate, dp_shard, cp, tp and dp, which is dp_shard"),
        ("--mesh cp=4,tp=8", "4 heads of llama cannot be divided over the 8 ranks of tp"),
        ("--seq-len 99999999999999999", "is not a positive number up to 1,099,511,627,776"),
        ("--mesh cp=99999999999999999999", "is not a mesh"),
        ("--seq-len 1099511627776", "has more pairs of tokens than 1,152,921,504,606,846,976"),
        ("--machine {folder}/other.json", "has schema 0, this version reads 2"),
        ("--layout zag", "unknown layout 'zag'"),
        ("--cu-seqlens 4,8", "cu_seqlens"),
        ("--sweep pp=2", "'pp=2' cannot be swept"),
        ("--sweep cp=2 --trace {folder}/x.json", "--trace is of one step"),
        ("--png {folder}/x.png", "--png draws which strategy wins, and needs --sweep"),
        ("--trace {folder}/no/x.json", "No such file or directory"),
        ("--checkpoint some", "invalid choice: 'some'"),
        ("--model nobodys", "nobodys is neither a file or folder, nor a model type"),
        ("--model rwkv", "rwkv has no attention, so there is nothing to make parallel"),
        ("--model jamba", "JambaMambaMixer is a layer with a state that is not simulated: only"),
        ("--model bert", "bert sees tokens ahead"),
        ("--model {folder}/huge.json", "hidden_size of llama must be a whole number from 1"),
        ("--model {folder}/text.json", "is not a config.json"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(
    command: str, message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `simulate_step` refuses beside it is in test_step.py."""
    folder = config.parent
    (folder / "text.json").write_text("text")
    (folder / "huge.json").write_text(json.dumps(CONFIG | {"hidden_size": 2**40}))
    machine = json.loads(as_machine("h100").to_json()) | {"schema": 0}
    (folder / "other.json").write_text(json.dumps(machine))
    try:
        status: Any = _run(COMMAND, config, *command.format(folder=folder).split())
    except SystemExit as error:
        status = error.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_file_of_a_machine(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config.parent / "mine.json"
    path.write_text(replace(as_machine("h100"), name="mine").to_json())
    assert _run(f"{COMMAND} --machine {path}", config) == 0
    assert "llama on mine" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "package"), [("html", "plotly"), ("png", "matplotlib")])
def test_packages_that_are_missing(
    option: str, package: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = " --sweep cp=2" if option == "png" else ""
    with patch.dict("sys.modules", {package: None}):
        path = config.parent / "x"
        assert _run(f"{COMMAND}{sweep} --{option} {path}", config) == 2
    assert f"pip install {package}" in capsys.readouterr().err
