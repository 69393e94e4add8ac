"""The contract of kernels: what the first launch of each kind is checked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtensor_ring import register_kernel
from dtensor_ring.compute.kernels import KERNELS, Kernel, Saved
from dtensor_ring.compute.kernels.reference import Reference
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
