"""Machines in numbers: files, data sheets, and the order of kernels that they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import prefer_measured
from dtensor_ring.compute.kernels import KERNELS, Problem, select_kernel
from dtensor_ring.compute.kernels.registry import preferred
from dtensor_ring.lab.machine import FORMS, Curve, KernelSpeed, Links, Machine
from dtensor_ring.lab.presets import PRESETS, as_machine
from tests.lab.machines import round_machine
from tests.test_public import ROOT

LINE = Curve.line(1e-5, 1e11)
LINKS = Links(LINE, LINE, LINE, LINE)
SPEEDS = tuple(
    KernelSpeed(kernel, "bfloat16", dim, form, Curve.line(seconds, 1e14), LINE)
    for kernel, dim, form, seconds in (
        ("flash", 64, "full", 1.0),
        ("flash", 128, "full", 2.0),
        ("flash", 128, "causal", 3.0),
        ("any", 128, "full", 4.0),
    )
)
MACHINE = Machine(
    *("mine", "a device", "measured", 4, 2**30, SPEEDS, {"bfloat16": 1e14}, 1e12),
    *(LINE, LINE, LINKS, LINKS),
    samples={"pack": [1, 2.5, None]},
)


@pytest.mark.parametrize(
    ("size", "seconds"), [(0, 1.0), (10, 1.0), (20, 1.5), (30, 2.0), (40, 2.0), (70, 5.0)]
)
def test_a_curve_is_linear_between_sizes(size: float, seconds: float) -> None:
    curve = Curve((10, 30, 40, 50), (1.0, 2.0, 2.0, 3.0))
    assert curve(size) == seconds
    assert curve(np.array([size, size])).tolist() == [seconds, seconds]


def test_a_curve_of_one_size_is_constant_and_a_line_keeps_its_digits() -> None:
    assert Curve((5,), (2.0,))(9) == 2.0
    assert LINE(3e9) == pytest.approx(0.03001, rel=1e-12)
    assert LINE(0) == 1e-5


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ((), ()),
        ((1.0,), (1.0, 2.0)),
        ((1.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((-1.0,), (1.0,)),
        ((1.0,), (-1.0,)),
        ((1.0, 2.0), (1.0, float("inf"))),
    ],
)
def test_a_curve_that_is_none(sizes: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(sizes, seconds)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hop": -1}, "hop of a machine must be 0 or more, got -1"),
        ({"gemm": {"float32": 0.0}}, "gemm float32 of a machine must be 1 or more, got 0.0"),
    ],
)
def test_numbers_out_of_range(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(MACHINE, **changes)


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_file_holds_every_field(random: Random) -> None:
    sizes = sorted({random.random() for _ in range(4)})
    curve = Curve(tuple(sizes), tuple(sorted(random.random() for _ in sizes)))
    machine = replace(
        MACHINE,
        inside=replace(LINKS, all_gather=curve),
        hop=random.random(),
        host_waits=random.random() < 0.5,
        versions={"torch": str(random.random())},
        kernels=random.sample(SPEEDS, 2)[:1],
    )
    machine = replace(machine, kernels=tuple(machine.kernels))
    found = Machine.from_json(machine.to_json())
    assert found == machine
    assert hash(found) == hash(machine)
    assert found.inside.all_gather(0.5) == curve(0.5)


CHANGES: dict[str, Any] = {"kernels": SPEEDS[:1], "gemm": {}, "versions": {"a": "b"}}
CHANGES |= {"samples": {}, "inside": replace(LINKS, p2p=Curve((1,), (1,))), "host_waits": True}
CHANGES |= {"between": CHANGES["inside"], "merge": Curve((1,), (1,)), "pack": Curve((1,), (1,))}


@pytest.mark.parametrize("name", [x.name for x in fields(Machine)])
def test_a_digest_differs_by_any_field(name: str) -> None:
    before = getattr(MACHINE, name)
    after = CHANGES[name] if name in CHANGES else before + (1 if before != str(before) else "1")
    assert replace(MACHINE, **{name: after}).digest != MACHINE.digest


def edited(**changes: Any) -> str:
    """The file with other fields; `None` leaves a field out."""
    content = json.loads(MACHINE.to_json()) | changes
    return json.dumps({name: x for name, x in content.items() if x is not None})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "has schema None, this version reads 2"),
        (edited(schema=3), "has schema 3, this version reads 2"),
        (edited(memory=None), "it lacks memory and has none too many"),
        (edited(colour="red"), "it lacks none and has colour too many"),
        (edited(memory=1.5), "memory of it must be a whole number from 1 to"),
        (edited(hop=True), "hop of it must be a number of 0 or more, got True"),
        (edited(host_waits=1), "host_waits of it must be true or false, got 1"),
        (edited(hop=-1), "hop of it must be a number of 0 or more, got -1"),
        (edited(gemm={"float32": float("nan")}), "float32 of gemm of it must be a number of 1 or"),
        (edited(gemm={"float32": 0}), "float32 of gemm of it must be a number of 1 or more, got 0"),
        (edited(gemm={"float32": -1}), "float32 of gemm of it must be a number of 1 or more"),
        (edited(gemm={"float32": float("inf")}), "float32 of gemm of it must be a number of 1 or"),
        (edited(ranks_per_host=10**30), "ranks_per_host of it must be a whole number from 1 to"),
        ("[" * 200_000, "it is not JSON"),
        (edited(merge={"sizes": [2, 1], "seconds": [1, 2]}), "merge of it: sizes of a curve"),
        (edited(merge={"sizes": [2, 1]}), "merge of it must have the fields of Curve"),
        (edited(kernels=[1]), "an entry of kernels of it must have the fields of KernelSpeed"),
    ],
)
def test_a_file_that_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="it") as error:
        Machine.from_json(text, "it")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        (("bfloat16", 128, "full"), 2.0),
        (("float16", 64, "full"), 1.0),
        (("bfloat16", 80, "window"), 1.0),  # the nearest head dim has only full tiles
        (("bfloat16", 128, "window"), 3.0),
        (("bfloat16", 256, "causal", "flash"), 3.0),
        (("bfloat16", 128, "causal", "other"), 4.0),
    ],
)
def test_the_nearest_speed_stands_for_others(asked: Any, seconds: float) -> None:
    assert MACHINE.speed(*asked).forward(0) == seconds


@pytest.mark.parametrize(
    ("rows", "plain", "banded"),
    [
        ([("cudnn", "full"), ("flash", "full"), ("flash", "window")], "cudnn", "flash"),
        ([("cudnn", "full"), ("flash", "causal")], "cudnn", "cudnn"),
        ([("flash", "window"), ("other", "window")], "flash", "flash"),
        ([], None, None),
    ],
)
def test_windows_and_documents_need_a_kernel_that_has_windows(
    rows: list[tuple[str, str]], plain: str | None, banded: str | None
) -> None:
    kernels = tuple(KernelSpeed(kernel, "bfloat16", 64, form, LINE, LINE) for kernel, form in rows)
    machine = replace(MACHINE, kernels=kernels)
    assert machine.kernel_for("float16", False) == plain, "which is as fast as bfloat16"
    assert machine.kernel_for("bfloat16", True) == banded
    assert machine.kernel_for("float32", True) is None


def test_what_a_machine_lacks() -> None:
    with pytest.raises(ValueError, match="no speed of kernel any for float32 and full tiles, only"):
        MACHINE.speed("float32", 128, "full")
    only = replace(MACHINE, kernels=SPEEDS[:3])
    with pytest.raises(
        ValueError, match=r"kernel other for bfloat16 .*, only of flash of bfloat16"
    ):
        only.speed("bfloat16", 128, "full", "other")
    with pytest.raises(ValueError, match="machine mine is of a device, not of another"):
        MACHINE.check_device("another")
    MACHINE.check_device("a device")


def test_machines_by_name_and_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(MACHINE.to_json())
    assert as_machine(path) == as_machine(str(path)) == MACHINE
    assert as_machine(MACHINE) is MACHINE
    assert as_machine("H100").name == "h100"
    with pytest.raises(ValueError, match=r"nor one of a100, .*h100"):
        as_machine(tmp_path / "none.json")
    with pytest.raises(TypeError, match="machine must be a name, such as 'h100', or a file, got 3"):
        as_machine(3)  # type: ignore[arg-type]
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"machine file '.*mine.json' has schema None"):
        as_machine(path)


def machine_texts(content: Any) -> Iterator[str]:
    """Machine files, as text: what a file is, or has anywhere."""
    if isinstance(content, dict) and "ranks_per_host" in content:
        yield json.dumps(content)
    elif isinstance(content, dict | list):
        for x in content.values() if isinstance(content, dict) else content:
            yield from machine_texts(x)
    elif isinstance(content, str) and '"ranks_per_host"' in content:
        yield content


def test_machines_that_were_measured_can_be_read() -> None:
    """Those of other benchmarks' results too, which `simulator.py --again` simulates again."""
    paths = (ROOT / "benchmarks" / "results").glob("*/*.json")
    texts = {x: [*machine_texts(json.loads(x.read_text()))] for x in paths}
    assert {path.name for path, found in texts.items() if found} == {
        "machine.json",
        "simulator.json",
    }
    machines = {Machine.from_json(x, str(path)) for path, found in texts.items() for x in found}
    assert {x.device for x in machines} == {"cpu", "NVIDIA H200"}
    assert all(x.source == "measured" for x in machines)


# Machines from data sheets: marked as such, in files as in code, ordered as their sheets are.

NAMES = list(PRESETS)
SIZES = np.logspace(3, 13, 60)
PEAK = {"a100": 312, "h100": 989, "h200": 989, "h800": 989, "b200": 2250, "mi300x": 1307}
"""TFLOP/s in 16 bits, as data sheets have them."""
OF_A_LINE = {"a100": 300, "h100": 450, "h200": 450, "h800": 200, "b200": 900, "mi300x": 448}
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
    for links, line in ((machine.inside, OF_A_LINE[name]), (machine.between, 50)):
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


# Kernels in the order of what machine files say of them.

CAUSAL = Problem("cuda", torch.bfloat16, 128, 128)
WINDOW, PACKED = replace(CAUSAL, windowed=True), replace(CAUSAL, packed=True)


@pytest.fixture(autouse=True)
def usual_order() -> Iterator[None]:
    yield
    prefer_measured()


def machine_of(rates: dict[str, tuple[float, float]], dtype: str = "float16") -> Machine:
    """With FLOPs per second of causal tiles and of windows, 0 for no row."""
    rows = [
        KernelSpeed(kernel, dtype, 64, form, Curve.line(1e-6, rate), Curve.line(1e-6, rate))
        for kernel, of_kernel in rates.items()
        for form, rate in zip(("causal", "window"), of_kernel, strict=True)
        if rate
    ]
    return round_machine(kernels=tuple(rows))


def first(problem: Problem, number: int = 3) -> list[str]:
    return [x.name for x in preferred(problem)][:number]


FLASH = machine_of({"flash_attn2": (350e12, 186e12), "cudnn": (463e12, 0.0)})
FLEX = machine_of({"cudnn_flex": (400e12, 390e12)})


def test_the_fastest_at_a_form_comes_first() -> None:
    usual = first(WINDOW), first(CAUSAL)
    assert first(WINDOW, 99)[-3:] == ["cudnn_flex", "cudnn_sdpa", "reference"]
    prefer_measured(FLASH, FLEX)
    assert first(WINDOW) == first(PACKED) == ["cudnn_flex", "flash_attn2", "flash_attn3"]
    assert first(CAUSAL) == ["cudnn", "cudnn_flex", "flash_attn2"]
    slow = machine_of({"cudnn_flex": (100e12, 100e12)})
    prefer_measured(FLASH, slow)
    assert first(WINDOW) == ["flash_attn2", "cudnn_flex", "flash_attn3"]
    prefer_measured()
    assert (first(WINDOW), first(CAUSAL)) == usual


@pytest.mark.parametrize(
    "problem",
    [replace(WINDOW, fleeting=True), replace(CAUSAL, dtype=torch.float32)],
    ids=["a cache", "another dtype"],
)
def test_what_keeps_the_usual_order(problem: Problem) -> None:
    usual = first(problem, len(KERNELS))
    prefer_measured(FLASH, FLEX)
    assert first(problem, len(KERNELS)) == usual


def test_rows_of_any_kernel_say_nothing() -> None:
    others = [x for x in first(WINDOW, 99) if x != "flash_attn2"]
    prefer_measured(machine_of({"flash_attn2": (1e12, 1e12), "any": (1e15, 1e15)}))
    assert first(WINDOW, 99) == ["flash_attn2", *others]
    assert FORMS[0] == "window"


def test_the_reference_stays_last_and_choices_are_made_again() -> None:
    problem = Problem("cpu", torch.float32, 64, 64)
    assert select_kernel(None, problem).name == "cpu_flash"
    prefer_measured(machine_of({"reference": (1e15, 1e15)}, "float32"))
    assert first(problem, 99)[-1] == "reference"
    assert select_kernel(None, problem).name == "cpu_flash"


def test_files(tmp_path: Path) -> None:
    """As `calibrate` writes them, a kernel each; the first one counts."""
    paths = [tmp_path / name for name in ("flash.json", "flex.json")]
    for path, machine in zip(paths, (FLASH, FLEX), strict=True):
        path.write_text(machine.to_json())
    prefer_measured(*paths, machine_of({"flash_attn2": (9e14, 9e14)}))
    assert first(WINDOW, 2) == ["cudnn_flex", "flash_attn2"]
    with pytest.raises(ValueError, match="neither a file that can be read"):
        prefer_measured(tmp_path / "none.json")
    assert first(WINDOW, 2) == ["cudnn_flex", "flash_attn2"], "as before"
