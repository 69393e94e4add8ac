"""Benchmarks that can run anywhere do, small."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dtensor_ring.lab.machine import Machine
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
