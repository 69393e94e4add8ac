"""Machines from data sheets: marked as such, in files as in code, ordered as their sheets are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtensor_ring.lab.machine import Curve, Machine
from dtensor_ring.lab.presets import PRESETS, as_machine

NAMES = list(PRESETS)
SIZES = np.logspace(3, 13, 60)
PEAK = {"a100": 312, "h100": 989, "h200": 989, "h800": 989, "b200": 2250, "mi300x": 1307}
"""TFLOP/s in 16 bits, as data sheets have them."""
LINE = {"a100": 300, "h100": 450, "h200": 450, "h800": 200, "b200": 900, "mi300x": 448}
"""GB/s to other devices of a host, likewise."""
NOT_SLOWER = [("h200", "h100"), ("b200", "h200"), ("h100", "a100"), ("h100", "h800")]


def _rate(curve: Curve, size: float) -> float:
    """What a size more adds, in sizes per second: without what the smallest takes."""
    return size / (curve(2 * size) - curve(size))


def test_names_that_machines_are_asked_for() -> None:
    assert {"a100", "h100", "h200", "b200", "mi300x"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_marked_and_comes_back_from_a_file(name: str, tmp_path: Path) -> None:
    machine = as_machine(name)
    assert (machine.name, machine.source, machine.ranks_per_host) == (name, "data sheet", 8)
    (tmp_path / "machine.json").write_text(machine.to_json())
    assert as_machine(tmp_path / "machine.json") == machine


@pytest.mark.parametrize("name", NAMES)
def test_no_preset_is_faster_than_its_data_sheet(name: str) -> None:
    machine = PRESETS[name]
    for speed in machine.kernels:
        reached = [_rate(x, 1e14) for x in (speed.forward, speed.backward)]
        reached += [float((SIZES / x(SIZES)).max()) for x in (speed.forward, speed.backward)]
        assert max(reached) < PEAK[name] * 1e12, speed.form
    assert machine.gemm["bfloat16"] < PEAK[name] * 1e12
    for links, line in ((machine.inside, LINE[name]), (machine.between, 50)):
        for curve in (links.p2p, links.all_to_all, links.all_gather, links.reduce_scatter):
            assert _rate(curve, 2.0**32) < line * 1e9


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_knows_all_forms_and_both_directions(name: str) -> None:
    machine = PRESETS[name]
    for form in ("full", "causal", "window"):
        speed = machine.speed("bfloat16", 128, form)
        # The same FLOPs are one and a half to six times faster forward than all of both together.
        assert speed.backward(2.5e12) > 1.5 * speed.forward(1e12)
        assert speed.backward(2.5e12) < 6 * speed.forward(1e12)


@pytest.mark.parametrize(("newer", "older"), NOT_SLOWER)
def test_newer_machines_are_not_slower(newer: str, older: str) -> None:
    fast, slow = PRESETS[newer], PRESETS[older]
    assert fast.memory_rate >= slow.memory_rate
    assert fast.memory >= slow.memory
    for form in ("full", "causal"):
        ours, theirs = (x.speed("bfloat16", 128, form) for x in (fast, slow))
        assert ours.forward(1e12) <= theirs.forward(1e12)
        assert ours.backward(2.5e12) <= theirs.backward(2.5e12)
    for name in ("p2p", "all_to_all", "all_gather", "reduce_scatter"):
        # Sizes at which rates count, not latencies; measured rates of equal links differ by 1 %.
        assert getattr(fast.inside, name)(2.0**28) <= 1.02 * getattr(slow.inside, name)(2.0**28)


def test_a_machine_is_found_by_a_name_in_any_case() -> None:
    assert as_machine("H100") is PRESETS["h100"]
    assert isinstance(as_machine(PRESETS["b200"]), Machine)
