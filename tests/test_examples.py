"""The examples run as their users run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_public import ROOT

EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# What torchrun gives a rank that has no others; its own process, which imports torch, is spared.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
ALONE |= {"MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}


def test_quickstart() -> None:
    script = str(EXAMPLES / "quickstart.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [
        subprocess.Popen([sys.executable, *prefix, script], cwd=ROOT, env=environment, **pipes)
        for prefix in (TORCHRUN, ())
    ]
    for run, world_size in zip(runs, (2, 1), strict=True):
        printed, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors
        assert not errors
        checked = r"world size (\d), .*: causal and sliding match one device\n"
        assert re.fullmatch(checked, printed).group(1) == str(world_size)  # pyrefly: ignore


def test_demo(tmp_path: Path) -> None:
    script = EXAMPLES / "train_hf.py"
    options = ("--steps", "3", "--seq-len", "64", "--layout", "striped", "--out", tmp_path)
    command = [sys.executable, script, *options]
    run = subprocess.run(command, timeout=200, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    runs = [json.loads((tmp_path / name).read_text()) for name in ("ring.json", "stock.json")]
    losses = [run["losses"] for run in runs]
    assert [len(curve) for curve in losses] == [3, 3]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=0)
    assert f"{losses[0][-1]:.6f}" in run.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "and waited for messages" in run.stdout
    ring, stock = runs
    assert stock["spans"] == []
    assert len(ring["spans"]) == 2
    for (kind, begin, end), *spans in ring["spans"]:
        assert kind == "all"
        assert {"tile", "merge", "send", "wait"} <= {kind for kind, _, _ in spans}
        assert all(begin <= first <= last <= end for _, first, last in spans)


def test_generate(tmp_path: Path) -> None:
    options = ("--prompt-len", "300", "--new", "5", "--seconds", "1", "--out", tmp_path)
    command = [sys.executable, EXAMPLES / "generate_hf.py", *options]
    run = subprocess.run(command, timeout=200, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "all 5 tokens agree: True" in run.stdout
    assert (tmp_path / "generate_hf.pt").exists()
    found = json.loads((tmp_path / "generated.json").read_text())
    pair = 4 * 2 * 2 * 32 * 4  # layers, heads, keys and values, head dim, bytes
    # Half the prompt on each rank, and on one of them a block for what is decoded.
    assert sorted(found["cache_bytes"]) == [pair * 150, pair * (150 + 256)]


def test_profile(tmp_path: Path) -> None:
    options = ("--seq-len", "64", "--folder", tmp_path)
    command = [sys.executable, EXAMPLES / "profile_ring.py", *options]
    run = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"wrote {tmp_path / 'ring-rank0.json'}\n"


def printed_losses(world_size: int, script: str, *options: str) -> list[float]:
    """The losses that an example prints, one for each step; several ranks are torchrun's."""
    torchrun = (*TORCHRUN[:-1], str(world_size)) if world_size > 1 else ()
    run = subprocess.run(
        [sys.executable, *torchrun, EXAMPLES / script, *options],
        cwd=ROOT,
        env=os.environ | ALONE,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", run.stdout, re.M)]


def test_train_own() -> None:
    losses, expected = (printed_losses(n, "train_own.py") for n in (2, 1))
    assert len(losses) == 10
    assert losses == pytest.approx(expected, rel=1e-5)


def test_train_fsdp(tmp_path: Path) -> None:
    """Two ranks of one ring, then one rank that goes on from their checkpoint."""
    small = "--seq-len", "64"
    expected = printed_losses(
        1, "train_fsdp.py", *small, "--cp=1", "--steps=4", "--folder", str(tmp_path / "whole")
    )
    folder = "--folder", str(tmp_path / "parts")
    losses = printed_losses(2, "train_fsdp.py", *small, "--cp=2", "--steps=2", *folder)
    losses += printed_losses(1, "train_fsdp.py", *small, "--cp=1", "--steps=4", "--resume", *folder)
    assert len(losses) == 4
    assert losses == pytest.approx(expected, rel=1e-5)


def test_finetune_sft(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    launch = ("-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file")
    options = ("--steps", "3", "--seq-len", "128", "--files", "3", "--lora", "--out", tmp_path)
    command = [sys.executable, *launch, EXAMPLES / "finetune_sft.yaml"]
    command += [EXAMPLES / "finetune_sft.py", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, timeout=200, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    first, *_, last = (float(x) for x in re.findall(r"{'loss': '([0-9.]+)'", run.stdout))
    assert 4 < last < first < 6  # of 257 bytes, at random 5.5
    assert (tmp_path / "adapter_model.safetensors").stat().st_size
