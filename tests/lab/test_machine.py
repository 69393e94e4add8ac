"""Machines in numbers: curves, files, and what is said of files that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring.lab.machine import Curve, KernelSpeed, Links, Machine
from dtensor_ring.lab.presets import as_machine
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
