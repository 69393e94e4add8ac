"""Examples and benchmarks run, and print what their pages say."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dtensor_ring.lab.machine import Machine
from tests.pool import Pool
from tests.scripts import run_launcher, run_script
from tests.test_public import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where benchmarks run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(name: str, folder: Path) -> dict[str, Any]:
    """What a benchmark writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", "--quick"])
        import_module(name).main()
    return json.loads((folder / "out" / f"{name}.json").read_text())


def test_benchmark_of_the_loss(folder: Path) -> None:
    costs = measured("loss", folder)["costs"]
    assert [cost["name"] for cost in costs[:2]] == ["whole logits", "ours"]
    assert all(len(cost["both"]) == 2 for cost in costs)
    assert costs[0]["logits"] > 1, "they were counted"


@pytest.mark.repeats  # it starts processes for seconds
def test_benchmark_of_a_fixed_order(folder: Path) -> None:
    measurements = measured("fixed_order", folder)["measurements"]
    assert [m["case"]["dtype"] for m in measurements] == ["float32", "bfloat16"]
    assert all(m["seconds"].keys() == {"default", "fixed"} for m in measurements)


@pytest.mark.repeats  # it draws keys for seconds
def test_benchmark_of_decoding(folder: Path) -> None:
    measurements = measured("decode", folder)["measurements"]
    assert [m["case"]["world_size"] for m in measurements] == [2, 2]
    assert all(len(times) == 5 for m in measurements for times in m["seconds"].values())


def test_benchmark_of_generation(folder: Path) -> None:
    (found,) = measured("generate", folder)["measurements"]
    names = {"1 process", "2 ranks"}
    assert found["first"].keys() == found["steps"].keys() == found["cache_bytes"].keys() == names


@pytest.mark.repeats  # four models of real widths
def test_benchmark_of_serving(folder: Path) -> None:
    (found,) = measured("serving", folder)["measurements"]
    assert len(found["seconds"]) == 4
    assert found["pool_bytes"].keys() == found["steps"].keys() == {"ours, 1 rank", "ours, 2 ranks"}


def test_benchmark_of_selected_keys(folder: Path) -> None:
    """Half of the keys, and one in 64: what arrives is what was asked for, and requests."""
    found = measured("selected", folder)["measurements"]
    assert [m["case"]["part"] for m in found] == [2, 64]
    for m in found:
        others, width = m["case"]["seq_len"] // 2, 4 * 576
        assert m["received"]["all"] == others * width
        asked = m["received"]["selected"] - others // 8
        assert asked % width == 0
        assert asked == pytest.approx(others * width / m["case"]["part"], rel=0.5)
        assert [len(stages) for stages in m["seconds"].values()] == [2, 2]


@pytest.mark.repeats  # half a minute
def test_benchmark_of_a_million_tokens(folder: Path) -> None:
    results = measured("million_tokens", folder)
    assert results["stock-1"][0]["answer"] == results["passkey-2"][0]["answer"]
    (two,), (four,) = results["step-2"], results["step-4"]
    assert two["loss"] == pytest.approx(four["loss"], rel=1e-5)
    card = (folder / "out" / "million_tokens.md").read_text()
    assert all(f"{x['gradient_norm']:.6f}" in card for x in (two, four))


def test_benchmark_of_frames(folder: Path) -> None:
    counts = measured("frames", folder)["counts"]
    assert len(counts) == 9
    for count in counts:
        assert count["calls"] == sum(count["by_file"].values()) > 0
        has_kernel = not count["name"].startswith("sum_over_sequence")
        assert (count["at_kernel"] > 0) == has_kernel


@pytest.mark.repeats  # half a minute
def test_benchmark_of_the_simulator(folder: Path) -> None:
    calibration, *others = measured("simulator", folder)["measurements"]
    assert Machine.from_json(calibration["machine"]).ranks_per_host == 2
    for found in others:
        assert {"ring", "ulysses:2"} == found["seconds"].keys()
    assert "ulysses:2" in (folder / "out" / "simulator.md").read_text()


def test_benchmark_of_packed_documents(folder: Path) -> None:
    """Whatever the lengths, one axis is even, and rows that need no other rank receive nothing."""
    found = measured("packed", folder)["packed"]
    assert len(found) == 3 * 3 * 4  # lengths, batches, ways
    for one in found:
        assert one["imbalance"] <= 1.05 or one["way"] != "one axis, balanced"
        assert (one["received_by_all"] > 0) == (one["cp"] > 1)
        assert one["received"] * 8 >= one["received_by_all"]
        assert one["step"] > 32 * one["attention"] > 0


@pytest.mark.repeats  # it runs layers of transformers
def test_benchmark_of_states(folder: Path) -> None:
    found = measured("states", folder)
    assert [m["case"]["world_size"] for m in found["measurements"]] == [2, 2]
    assert all(x["sharded"] <= 1.5 * x["whole"] for x in found["errors"])


# The examples run as their users run them.

EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# What torchrun gives a rank that has no others; its own process, which imports torch, is spared.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
ALONE |= {"MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("ranks", [0, 2])
def test_quickstart(ranks: int) -> None:
    checked = rf"world size {ranks or 1}, .*: causal and sliding match one device\n"
    first, *others = run_script(EXAMPLES / "quickstart.py", ranks=ranks)
    assert re.fullmatch(checked, first.printed)
    assert not any(x.errors for x in (first, *others))


@pytest.fixture
def launched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What an example prints that starts its ranks under torchrun; here the fork server does."""

    def run(name: str, *options: object) -> str:
        script = str(EXAMPLES / f"{name}.py")
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [script, *map(str, options)])
        example = import_module(name)
        monkeypatch.setattr(example.subprocess, "run", torchrun)
        # A model that has learnt from short text generates as well as one that has learnt more.
        monkeypatch.setattr(import_module("generate_hf"), "TRAINED_LENGTH", 32)
        try:
            example.main()
        finally:
            torch.set_num_threads(1)
        return capsys.readouterr().out

    def torchrun(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        assert tuple(command[1:4]) == TORCHRUN[:3]
        flag, _, ranks = command[4].partition("=")
        assert flag == "--nproc-per-node"
        for rank in run_script(*command[5:], ranks=int(ranks), env=env):
            print(rank.printed, end="")
        return SimpleNamespace(returncode=0)

    return run


def test_demo(tmp_path: Path) -> None:
    options = ("--steps", 2, "--batch", 1, "--seq-len", 64, "--layout", "striped")
    ended = run_launcher(EXAMPLES / "train_hf.py", *options, "--out", tmp_path)
    assert ended.code == 0, ended
    assert not any(word in ended.printed + ended.errors for word in ("ERROR", "Warning"))
    runs = [json.loads((tmp_path / name).read_text()) for name in ("ring.json", "stock.json")]
    losses = [run["losses"] for run in runs]
    assert [len(curve) for curve in losses] == [2, 2]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=0)
    assert f"{losses[0][-1]:.6f}" in ended.printed
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "and waited for messages" in ended.printed
    ring, stock = runs
    assert stock["spans"] == []
    assert len(ring["spans"]) == 2
    for (kind, begin, end), *spans in ring["spans"]:
        assert kind == "all"
        assert {"tile", "merge", "send", "wait"} <= {kind for kind, _, _ in spans}
        assert all(begin <= first <= last <= end for _, first, last in spans)


def test_generate(tmp_path: Path, launched: Callable[..., str]) -> None:
    options = ("--prompt-len", 300, "--new", 5, "--seconds", 0.1, "--out", tmp_path)
    printed = launched("generate_hf", *options)
    assert "all 5 tokens agree: True" in printed
    assert (tmp_path / "generate_hf.pt").exists()
    found = json.loads((tmp_path / "generated.json").read_text())
    pair = 4 * 2 * 2 * 32 * 4  # layers, heads, keys and values, head dim, bytes
    # Half the prompt on each rank, and on one of them a block for what is decoded.
    assert sorted(found["cache_bytes"]) == [pair * 150, pair * (150 + 256)]


def test_serve_batch(tmp_path: Path, launched: Callable[..., str]) -> None:
    """Two beginnings of a block and more, each computed once; what follows them 4 times."""
    sizes = ("--prompts", 4, "--prefixes", 2, "--prefix-len", 300, "--new", 3)
    printed = launched("serve_batch", *sizes, "--seconds", 0.1, "--out", tmp_path)
    assert "all tokens agree: True" in printed
    found = json.loads((tmp_path / "served.json").read_text())
    block, written = 256, 300 + 32 - 1
    assert found["prefilled"] == 2 * block + 4 * (written - block)
    assert found["cached"] == 2 * block
    assert found["most_shared"] == 2


def test_passkey(tmp_path: Path, launched: Callable[..., str]) -> None:
    """A model that has learnt nothing: its answer is that of one process, but not the passkey."""
    options = ("--tokens", 512, "--compared", 256, "--chunk", 128, "--seconds", 0)
    with pytest.raises(SystemExit, match=r"^the passkey was not found$"):
        launched("million", "--part", "passkey", *options, "--out", tmp_path)
    (stock,) = json.loads((tmp_path / "stock-1.json").read_text())
    short, long = json.loads((tmp_path / "passkey-2.json").read_text())
    assert stock["answer"] == short["answer"]
    assert (stock["num_tokens"], short["num_tokens"], long["num_tokens"]) == (256, 256, 512)
    token = 2 * 32 * 4  # keys and values, head dim, bytes
    windows = 3 * 31 * token  # layers, tokens
    # Half the prompt on each rank, and on one of them a block for what is decoded.
    assert sorted(long["cache_bytes"]) == [256 * token + windows, 512 * token + windows]


def test_step_of_other_ranks(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    million = import_module("million")
    options = ("--part", "step", "--tokens", 1024, "--other", 1, "--out", tmp_path)
    monkeypatch.setattr(sys, "argv", ["million.py", *map(str, options)])

    def launch(options: Namespace, part: str, num_ranks: int) -> None:
        pool.run(num_ranks, _run_million, options)

    monkeypatch.setattr(million, "launch", launch)
    million.main()
    (two,), (one,) = (json.loads((tmp_path / f"step-{n}.json").read_text()) for n in (2, 1))
    for name in ("loss", "gradient_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-5)
    assert f"{one['loss']:.7f}" in capsys.readouterr().out
    assert max(two["alive_bytes"]) < 0.6 * one["alive_bytes"][0]


def _run_million(options: Namespace) -> None:
    import_module("million").run(options)


def test_lessons() -> None:
    """Labels are the digits of a passkey that stands before them, once without labels."""
    passkey = import_module("parts.passkey")
    text = torch.full((4096,), ord(" "), dtype=torch.uint8)
    tokens, labels = passkey.lesson_of(text, 256, 8, torch.Generator().manual_seed(0))
    asked = re.compile(re.escape(passkey.QUESTION) + rb"(\d{6})")
    for row, label in zip(tokens, labels, strict=True):
        first, *others = asked.finditer(bytes(row.tolist()))
        assert {x[1] for x in others} == {first[1]}
        assert len(others) == 3
        labelled = [i for x in others for i in range(*x.span(1))]
        assert (label != -100).nonzero().flatten().tolist() == labelled
        assert torch.equal(label[labelled], row[labelled])


@pytest.mark.parametrize(("depth", "begin"), [(0.0, 0), (0.5, 42), (1.0, 84)])
def test_hidden_passkey(depth: float, begin: int) -> None:
    passkey = import_module("parts.passkey")
    text, digits = torch.full((100,), ord(" "), dtype=torch.uint8), torch.tensor(list(b"123456"))
    prompt = bytes(passkey.hide(text, digits, depth).tolist())
    assert prompt == (b" " * begin + passkey.QUESTION + b"123456").ljust(95) + passkey.QUESTION
    with pytest.raises(ValueError, match="at least 16 tokens, got 15"):
        passkey.hide(text[:15], digits, depth)


def test_profile(tmp_path: Path) -> None:
    options = ("--seq-len", 64, "--folder", tmp_path)
    (run,) = run_script(EXAMPLES / "profile_ring.py", *options)
    assert run.printed == f"wrote {tmp_path / 'ring-rank0.json'}\n"


def printed_losses(world_size: int, script: str, *options: str) -> list[float]:
    """The losses that an example prints, one for each step."""
    first, *_ = run_script(EXAMPLES / script, *options, ranks=world_size)
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", first.printed, re.M)]


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


def test_train_distributed_config(tmp_path: Path) -> None:
    """On 2 x 2 ranks, and the same script on one: losses, and the models that are saved."""
    small = "--seq-len=64", "--steps=3", f"--model={tmp_path / 'small'}"
    runs = {"parts": (4, ()), "whole": (1, ("--cp-size=1", "--fsdp-size=1"))}
    losses, expected = (
        printed_losses(
            ranks, "train_distributed_config.py", *small, *degrees, f"--out={tmp_path / out}"
        )
        for out, (ranks, degrees) in runs.items()
    )
    assert len(losses) == 3
    assert losses == pytest.approx(expected, abs=2e-6)
    trained, alone = (load_file(tmp_path / out / "model.safetensors") for out in runs)
    assert trained.keys() == alone.keys()
    for name, x in trained.items():
        torch.testing.assert_close(x, alone[name], atol=1e-4, rtol=0)


def test_train_packed() -> None:
    """Two by two ranks as one axis, then one rank: losses and gradient norms of both."""
    options = "--tokens=8192", "--longest=1000", "--steps=2"
    line = (
        r"^step \d: loss (.*), gradient norm (.*); (\d+) documents, (\d+) of them whole on a rank"
    )

    def steps(ranks: int, cp: int) -> torch.Tensor:
        script = EXAMPLES / "train_packed.py"
        first, *_ = run_script(script, *options, f"--cp={cp}", ranks=ranks)
        return torch.tensor(
            [[float(x) for x in step] for step in re.findall(line, first.printed, re.M)]
        )

    found, expected = steps(4, 2), steps(1, 1)
    assert found.shape == (2, 4)
    torch.testing.assert_close(found[:, :3], expected[:, :3], rtol=1e-4, atol=0)
    assert (expected[:, 3] == expected[:, 2]).all()
    whole = found[:, 3]
    assert ((whole > 0) & (whole < found[:, 2])).all(), "some are spread"


def test_finetune_sft(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    launch = ("accelerate.commands.launch", "--main_process_port", "0", "--config_file")
    options = ("--steps", "3", "--seq-len", "128", "--files", "3", "--lora", "--out", tmp_path)
    script = EXAMPLES / "finetune_sft.py"
    run = run_launcher(*launch, script.with_suffix(".yaml"), script, *options)
    assert run.code == 0, run.errors
    first, *_, last = (float(x) for x in re.findall(r"{'loss': '([0-9.]+)'", run.printed))
    assert 4 < last < first < 6  # of 257 bytes, at random 5.5
    assert (tmp_path / "adapter_model.safetensors").stat().st_size
