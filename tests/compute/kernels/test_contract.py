"""The contract of kernels, those of third parties among them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtensor_ring import available_kernels, register_kernel
from dtensor_ring.compute.kernels import (
    KERNELS,
    Kernel,
    Problem,
    Saved,
    clear_kernel_cache,
    select_kernel,
)
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import unregister_kernel
from tests.rings import Case as RingCase
from tests.segments import PACKED, SegmentsCase, check_segments
from tests.test_played import RINGS, Played, check_ring
from tests.tiles import TILES, Case, check_tile

Change = Callable[[tuple[Any, ...]], Any]


class Broken(Reference):
    """Returns what a function makes of the right results."""

    name = "broken"

    def __init__(self, forward: Change | None = None, backward: Change | None = None) -> None:
        self._forward, self._backward = forward, backward
        self.num_calls = 0

    def forward(self, *args: Any) -> Any:
        self.num_calls += 1
        result = super().forward(*args)
        return self._forward(result) if self._forward else result

    def backward(self, *args: Any) -> Any:
        self.num_calls += 1
        result = super().backward(*args)
        return self._backward(result) if self._backward else result


def checked(kernel: Kernel) -> Kernel:
    register_kernel(kernel)
    return KERNELS[kernel.name]


FORWARD = {
    "lse by row": (lambda x: (x[0], x[1].mT), "(2, 7, 2) torch.float32 on cpu)"),
    "narrow lse": (lambda x: (x[0], x[1].bfloat16()), "(2, 2, 7) torch.bfloat16 on cpu)"),
    "whole lse": (lambda x: (x[0], x[1].long()), "(2, 2, 7) torch.int64 on cpu)"),
    "wide out": (lambda x: (x[0].double(), x[1]), "((2, 2, 7, 8) torch.float64 on cpu, "),
    "token-major out": (lambda x: (x[0].transpose(1, 2), x[1]), "((2, 7, 2, 8) torch.float32 on"),
    "another device": (lambda x: (x[0].to("meta"), x[1]), "((2, 2, 7, 8) torch.float32 on meta, "),
    "out alone": (lambda x: x[0], "returned (2, 2, 7, 8) torch.float32 on cpu, expected"),
    "three": (lambda x: (*x, None), "torch.float32 on cpu, NoneType), expected (out"),
    "nothing": (lambda x: None, "returned NoneType, expected (out (2, 2, 7, 8)"),
}


@pytest.mark.parametrize(("change", "message"), FORWARD.values(), ids=list(FORWARD))
def test_what_forward_may_not_return(change: Change, message: str) -> None:
    kernel = checked(Broken(forward=change))
    for _ in range(2):  # it stays wrong
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            check_tile(kernel, TILES["full"], "cpu")
        assert str(raised.value).startswith(
            "kernel 'broken' breaks the contract of dtensor_ring.compute.kernels.Kernel: "
            "forward of a tile returned"
        )
        assert str(raised.value).endswith(
            "expected (out (2, 2, 7, 8) torch.float32 on cpu, "
            "lse (2, 2, 7) torch.float32 or wider on cpu)"
        )


BACKWARD = {
    "not summed over a group": lambda x: (x[0], x[1].repeat(1, 2, 1, 1), x[2]),
    "wide": lambda x: (x[0], x[1], x[2].double()),
    "another order": lambda x: (x[0], x[2], x[1]),
    "no gradient of query": lambda x: (None, x[1], x[2]),
    "two": lambda x: x[1:],
    "another device": lambda x: (x[0], x[1].to("meta"), x[2]),
}


@pytest.mark.parametrize("change", BACKWARD.values(), ids=list(BACKWARD))
def test_what_backward_may_not_return(change: Change) -> None:
    kernel = checked(Broken(backward=change))
    expected = (
        "expected (gradient of query (2, 4, 7, 8) torch.float32 on cpu, gradient of key "
        "(2, 2, 7, 8) torch.float32 on cpu, gradient of value (2, 2, 7, 4) torch.float32 on cpu)"
    )
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        check_tile(kernel, Case(heads=(4, 2), head_dims=(8, 4)), "cpu")
    assert "kernel 'broken' breaks the" in str(raised.value)
    assert "backward of a tile returned" in str(raised.value)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (Broken(forward=lambda x: (x[0], x[1].mT)), "forward of segments returned"),
        (Broken(backward=lambda x: (x[0][:-1], *x[1:])), "backward of segments returned"),
    ],
    ids=["forward", "backward"],
)
def test_segments_are_a_kind_of_their_own(kernel: Kernel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_segments(checked(kernel), PACKED["documents"], "cpu")


@pytest.mark.parametrize("case", [Case(), Case(dtype=torch.bfloat16), Case(dtype=torch.float64)])
def test_a_kernel_that_keeps_the_contract(case: Case) -> None:
    wide = Broken(forward=lambda x: (x[0], x[1].double()))
    kernel = checked(wide)
    segments = SegmentsCase((0, 5, 12), (0, 5, 12), dtype=torch.bfloat16)
    saved = [torch.ones(2, 2, 7, 8, dtype=case.dtype) for _ in range(5)]
    out, lse = kernel.forward(*saved[:3], case.launch, case.scores)
    assert lse.dtype == torch.float64, "wider than it has to be"
    kernel.backward(Saved(out, out, lse), *saved[:3], case.launch, case.scores)
    kernel.forward(*segments.tensors()[:3], segments.launch, segments.scores)
    assert wide.num_calls == 3


def test_only_the_first_launch_of_a_kind_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = checked(Broken())
    looks: list[str] = []
    check = type(kernel)._check

    def look(self: Any, kind: Any, *rest: Any) -> None:
        looks.append(kind[0])
        check(self, kind, *rest)

    monkeypatch.setattr(type(kernel), "_check", look)
    for _ in range(3):
        check_tile(kernel, TILES["full"], "cpu")
        check_tile(kernel, TILES["causal"], "cpu")
    assert looks == ["forward", "backward"]
    check_segments(kernel, PACKED["documents"], "cpu")
    check_tile(kernel, Case(dtype=torch.float64), "cpu")
    assert looks == ["forward", "backward"] * 3


def test_built_in_kernels_are_not_wrapped() -> None:
    assert all(
        type(kernel).__module__ != "dtensor_ring.compute.kernels.registry"
        for kernel in KERNELS.values()
    )


@pytest.mark.parametrize("name", ["zigzag", "window and documents"])
def test_a_registered_kernel_in_a_ring(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register_kernel(Broken())
    check_ring(RingCase(RINGS[name]), Played("broken", "cpu", torch.float32), monkeypatch)


def test_a_broken_kernel_in_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    register_kernel(Broken(forward=lambda x: (x[0].double(), x[1])))
    with pytest.raises(ValueError, match="kernel 'broken' breaks the contract"):
        check_ring(RingCase(RINGS["zigzag"]), Played("broken", "cpu", torch.float32), monkeypatch)


# Kernels of third parties: their place in the order, and what is asked of them.

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
            "is a string, got None; set `name` in tests.compute.kernels.test_contract",
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
    with pytest.raises(ValueError, match=r"'mine' of .*Other is taken by .*test_contract.*Mine;"):
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
