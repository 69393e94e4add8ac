"""Kernels in the order of what machine files say of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtensor_ring import Machine, prefer_measured
from dtensor_ring.compute.kernels import KERNELS, Problem, select_kernel
from dtensor_ring.compute.kernels.registry import preferred
from dtensor_ring.lab.machine import FORMS, Curve, KernelSpeed
from tests.lab.machines import round_machine

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
