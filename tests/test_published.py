"""The page of the simulator: published measurements, and what is simulated for them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks import measured_steps
from benchmarks.published import (
    MARKERS,
    MASKS,
    PAGE,
    ROWS,
    SIMULATED,
    Comparison,
    Setting,
    Value,
    comparisons,
    copies,
    entering_once,
    in_unit,
    machine_of,
    measured,
    reason_of,
    rows,
    setting_of,
    simulate_all,
    simulated,
    summary,
    values_of,
    why,
)
from benchmarks.published_steps import FLOPS, MODELS, OVER_FIRST, simulated_steps, step_settings
from docs.marked import parts
from dtensor_ring.lab.presets import PRESETS
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import as_strategy, why_not

GROUPS, STEPS = measured()["groups"], measured()["steps"]
EXAMPLE = Setting(
    source="example",
    machine="h100",
    kernel="flash_attn3",
    gpus=4,
    heads=(8, 2),
    head_dim=128,
    tokens=4096,
    batch=2,
    mask="causal",
    direction="both",
    unit="TFLOP/s of a GPU",
    counts=("order", "value"),
)
NUM_FLOPS = 3.5 * 4 * 2 * 4096**2 / 2 * 8 * 128
RATES = ("TFLOP/s of a GPU", "% of one GPU", "iterations/s", "thousand tokens/s")


@cache
def _values() -> list[Value]:
    return values_of(measured(), json.loads(SIMULATED.read_text()))


def test_groups_are_well_formed() -> None:
    content = measured()
    for number, group in enumerate(GROUPS):
        setting = setting_of(group)
        source = content["sources"][setting.source]
        assert source["link"].startswith("https://"), number
        assert all(source[name] for name in ("title", "read")), number
        assert machine_of(setting.machine, setting.kernel).kernels, number
        assert setting.mask in MASKS, number
        assert set(setting.counts) <= {"order", "value"}, number
        assert setting.unit in (*RATES, "time over all-gather", "time over the first"), number
        for value in group["values"]:
            strategy = as_strategy(value["strategy"], setting.gpus)
            assert why_not(strategy, *setting.heads) is None, number
            assert as_layout(value["layout"]), number
            assert value["value"] > 0, number
            assert set(value) <= {"strategy", "layout", "value", "copies", "enters_once"}, number


def test_tables_of_steps_are_well_formed() -> None:
    for number, table in enumerate(STEPS):
        assert table["source"] in measured()["sources"], number
        assert machine_of(table["machine"], table["kernel"]).kernels, number
        assert table["unit"] in (FLOPS, OVER_FIRST), number
        for setting, value in zip(step_settings(table), table["values"], strict=True):
            assert setting.model in MODELS, number
            assert as_strategy(value["strategy"], setting.mesh[1]), number
            assert value["value"] > 0, number


def test_at_least_five_sources() -> None:
    assert len({x.setting.source for x in _values()}) >= 5


def test_the_pages_are_what_the_script_writes() -> None:
    content = measured(), json.loads(SIMULATED.read_text())
    on_page = parts(PAGE.read_text(), *MARKERS)[1]
    for text, lines in ((on_page, summary(*content)), (ROWS.read_text(), rows(*content))):
        assert text == "".join(f"{line}\n" for line in lines)


def test_measured_steps_are_on_the_page() -> None:
    on_page = parts(PAGE.read_text(), *measured_steps.MARKERS)[1]
    assert on_page.splitlines() == [*measured_steps.rows()], "python -m benchmarks.measured_steps"


def _near(found: list[float], kept: list[float]) -> bool:
    return found == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize("number", [0, 5, 14, 30, len(GROUPS) - 3])
def test_what_is_kept_is_what_is_simulated(number: int) -> None:
    kept = json.loads(SIMULATED.read_text())
    assert _near(simulated(GROUPS[number]), kept["adapted"][number])
    assert _near(simulated(GROUPS[number], is_adapted=False), kept["plain"][number])


def test_what_is_kept_of_steps_is_what_is_simulated() -> None:
    kept = json.loads(SIMULATED.read_text())["steps"]
    table, numbers = STEPS[-1], kept[-1]
    assert _near(simulated_steps(table, machine_of(table["machine"], table["kernel"])), numbers)


@pytest.mark.repeats
def test_all_that_is_kept_is_what_is_simulated() -> None:
    kept, found = json.loads(SIMULATED.read_text()), simulate_all(measured())
    assert kept.keys() == found.keys()
    for name, groups in found.items():
        assert [i for i, x in enumerate(groups) if not _near(x, kept[name][i])] == [], name


def test_the_aims_hold() -> None:
    """85 of 100 comparisons are right, and two of three values are hits."""
    pairs, judged = comparisons(_values()), [x for x in _values() if x.is_judged]
    assert sum(x.is_right for x in pairs) >= 0.85 * len(pairs) > 200
    assert sum(x.is_hit for x in judged) >= 2 / 3 * len(judged) > 90


def test_each_miss_has_a_reason_and_each_reason_a_miss() -> None:
    misses = measured()["misses"]
    found = [why(misses, x) for x in _values() if x.is_judged and not x.is_hit]
    found += [reason_of(misses, x) for x in comparisons(_values()) if not x.is_right]
    assert set(found) == set(range(1, len(misses) + 1))


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("TFLOP/s of a GPU", NUM_FLOPS / 0.01 / 4 / 1e12),
        ("iterations/s", 100.0),
        ("thousand tokens/s", 2 * 4096 / 0.01 / 1e3),
        ("time over the first", 0.5),
        ("time over all-gather", 0.5),
    ],
)
def test_seconds_in_units(unit: str, expected: float) -> None:
    assert in_unit(replace(EXAMPLE, unit=unit), 0.01, 0.02) == pytest.approx(expected)


def test_percent_of_one_gpu() -> None:
    """A GPU alone has the shard only: of 4 GPUs, a fourth of a rank's work."""
    speed = PRESETS["h100"].speed("bfloat16", 128, "causal", "flash_attn3")
    alone = speed.forward(NUM_FLOPS / 3.5 / 16) + speed.backward(NUM_FLOPS / 3.5 * 2.5 / 16)
    found = in_unit(replace(EXAMPLE, unit="% of one GPU"), 4 * alone, 1.0)
    assert found == pytest.approx(100)


@pytest.mark.parametrize(
    ("unit", "published", "found", "expected"),
    [
        ("iterations/s", (10, 12), (1, 2), [True]),
        ("iterations/s", (10, 12), (2, 1), [False]),
        ("iterations/s", (10, 12), (1, 1), [False]),
        ("iterations/s", (10, 10.2), (1, 2), []),
        ("time over the first", (1, 1.5), (1, 1.1), [True]),
        ("time over the first", (1, 0.8), (1, 1.1), [False]),
    ],
)
def test_comparisons(
    unit: str, published: tuple[float, ...], found: tuple[float, ...], expected: list[bool]
) -> None:
    setting = replace(EXAMPLE, unit=unit)
    values = [
        Value(setting, name, "zigzag", *numbers)
        for name, *numbers in zip(("around", "ulysses:4"), published, found, strict=True)
    ]
    assert [x.is_right for x in comparisons(values)] == expected
    assert comparisons([values[0], replace(values[1], setting=EXAMPLE)]) == []


def test_a_reference_is_not_judged() -> None:
    setting = replace(EXAMPLE, unit="time over the first")
    one, other = (Value(setting, "around", "zigzag", x, 1.2) for x in (1.0, 1.1))
    assert (one.is_judged, other.is_judged, other.is_hit) == (False, True, True)
    assert not replace(other, setting=replace(setting, counts=("order",))).is_judged
    assert not replace(other, simulated=1.27).is_hit


def test_reasons_go_by_the_first_that_fits() -> None:
    misses: list[dict[str, Any]] = [
        {"when": {"strategy": ["around", "ring"], "mask": "full"}, "why": "no"},
        {"when": {"strategy": "around"}, "why": "yes"},
        {"when": {}, "why": "last"},
    ]
    value = Value(EXAMPLE, "around", "zigzag", 1.0, 2.0)
    other = replace(value, strategy="ulysses:4")
    assert (why(misses, value), why(misses, other), why(misses[:1], value)) == (2, 3, None)
    assert reason_of(misses, Comparison(other, value)) == 2


def test_copies_of_other_libraries() -> None:
    """Two groups of 2 ranks make two steps; each rank has 2 x 1,024 tokens of 8 heads of 128."""
    machine = PRESETS["h100"]
    value = {"strategy": "ulysses:2+around", "copies": (10, 3)}
    expected = 2 * (10 * 2 * 1024 * 1024 / machine.memory_rate + 3 * machine.merge(0.0))
    assert copies(EXAMPLE, value, machine) == pytest.approx(expected)
    assert copies(EXAMPLE, {"strategy": "around"}, machine) == 0


def test_a_collective_enters_a_host_once() -> None:
    machine = PRESETS["h100"]
    found, latency = entering_once(machine), machine.between.p2p(0.0)
    assert found.inside == machine.inside
    for size in (2.0**16, 2.0**27):
        assert found.between.p2p(size) == pytest.approx(latency + machine.inside.p2p(size))
