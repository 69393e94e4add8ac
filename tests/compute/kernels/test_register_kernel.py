"""Kernels of third parties: their place in the order, and what is asked of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtensor_ring import available_kernels, register_kernel
from dtensor_ring.compute.kernels import KERNELS, Problem, clear_kernel_cache, select_kernel
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import unregister_kernel

PROBLEM = Problem("cpu", torch.float32, 8, 8)


class Mine(Reference):
    """Counts what it is asked."""

    name = "mine"

    def __init__(self) -> None:
        self.asked: list[Problem | None] = []

    def missing(self) -> str | None:
        self.asked.append(None)
        return None

    def supports(self, problem: Problem) -> str | None:
        self.asked.append(problem)
        return super().supports(problem)


class Yours(Reference):
    name = "yours"


def test_before_what_nobody_has_measured_and_the_reference_by_default() -> None:
    before = list(KERNELS)
    register_kernel(Mine())
    register_kernel(Yours())
    assert list(available_kernels()) == [*before[:-3], "mine", "yours", *before[-3:]]
    assert before[-3:] == ["cudnn_flex", "cudnn_sdpa", "reference"]
    assert select_kernel(None, PROBLEM).name == "cpu_flash"
    assert select_kernel("yours", PROBLEM).name == "yours"
    assert select_kernel(None, replace(PROBLEM, softcap=2.0)).name == "mine"


def test_before_another() -> None:
    assert select_kernel(None, PROBLEM).name == "cpu_flash", "which is remembered"
    before = list(KERNELS)
    register_kernel(Mine(), before="cpu_flash")
    region = before.index("cpu_flash")
    assert list(KERNELS) == [*before[:region], "mine", *before[region:]]
    assert select_kernel(None, PROBLEM).name == "mine"
    register_kernel(Yours(), before="mine")
    assert select_kernel(None, PROBLEM).name == "yours"
    unregister_kernel("yours")
    assert select_kernel(None, PROBLEM).name == "mine"


class Nameless(Reference):
    name: Any = None


@pytest.mark.parametrize(
    ("kernel", "before", "error", "message"),
    [
        (
            Mine,
            None,
            TypeError,
            "an instance of a subclass of dtensor_ring.compute.kernels.Kernel, got",
        ),
        (Mine, None, TypeError, "got the class Mine"),
        ("mine", None, TypeError, "dtensor_ring.compute.kernels.Kernel, got str"),
        (
            Nameless(),
            None,
            TypeError,
            "is a string, got None; set `name` in tests.compute.kernels.test_register",
        ),
        (
            Reference(),
            None,
            ValueError,
            "the kernel name 'reference' of dtensor_ring.compute.kernels.reference.Reference is "
            "taken by dtensor_ring.compute.kernels.reference.Reference; give the new kernel "
            "another",
        ),
        (Mine(), "flash9", ValueError, "unknown kernel 'flash9' in before; known kernels: flash_"),
        (Mine(), "mine", ValueError, "unknown kernel 'mine' in before; known kernels: flash_att"),
    ],
)
def test_what_is_refused(kernel: Any, before: str | None, error: type, message: str) -> None:
    names = list(KERNELS)
    with pytest.raises(error, match=re.escape(message)):
        register_kernel(kernel, before=before)
    assert list(KERNELS) == names


def test_a_name_is_registered_once() -> None:
    class Other(Reference):
        name = "mine"

    register_kernel(Mine())
    with pytest.raises(ValueError, match=r"'mine' of .*Other is taken by .*test_register.*Mine;"):
        register_kernel(Other())


def test_only_registered_kernels_are_taken_out() -> None:
    register_kernel(Mine())
    for name in ("reference", "flash9"):
        with pytest.raises(ValueError, match=f"'{name}' is not a registered kernel; .*'mine'"):
            unregister_kernel(name)


def test_a_kernel_is_asked_once() -> None:
    mine = Mine()
    register_kernel(mine, before="cpu_flash")
    for softcap in (0.0, 2.0, 0.0, 2.0):
        assert select_kernel(None, replace(PROBLEM, softcap=softcap)).name == "mine"
        assert select_kernel("mine", replace(PROBLEM, softcap=softcap)).name == "mine"
        assert available_kernels()["mine"] is None
    assert mine.asked.count(None) == 1
    assert mine.asked.count(PROBLEM) == 2, "by its name, and among all"
    assert mine.asked.count(replace(PROBLEM, softcap=2.0)) == 2
    clear_kernel_cache()
    select_kernel(None, PROBLEM)
    assert mine.asked.count(None) == 2
    assert mine.asked.count(PROBLEM) == 3


def test_what_is_missing_is_asked_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, device = Mine(), [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8 + device[0], 0))
    register_kernel(mine, before="flash_attn3")
    for device[0] in (0, 1, 0, 1):
        problem = Problem("cuda", torch.bfloat16, 8, 8)
        assert problem.capability == (8 + device[0], 0)
        assert select_kernel(None, problem).name == "mine"
        missing = available_kernels()["flash_attn3"] or ""
        assert ("this GPU has 8.0" in missing) == (device[0] == 0)
    assert mine.asked.count(None) == 2
    clear_kernel_cache()


def test_setting_of_determinism_is_not_forgotten() -> None:
    class Random(Mine):
        def supports(self, problem: Problem) -> str | None:
            return None if problem.determinism == "off" else "its gradients are random"

    register_kernel(Random(), before="cpu_flash")
    for setting, chosen in ((False, "mine"), (True, "cpu_flash"), (False, "mine")):
        torch.use_deterministic_algorithms(setting)
        try:
            assert select_kernel(None, Problem("cpu", torch.float32, 8, 8)).name == chosen
        finally:
            torch.use_deterministic_algorithms(False)
