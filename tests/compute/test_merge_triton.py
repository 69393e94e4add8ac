"""The one launch gives what the other passes give: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dtensor_ring.compute.memory import (
    HEAD_MAJOR,
    TOKEN_MAJOR,
    WHOLE,
    Accumulation,
    Order,
    Partial,
    empty,
    region,
)
from dtensor_ring.compute.merge import accumulate_sums

ROOT = Path(__file__).parents[2]
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
ROW = region(1, (3, 40))
LATER = region(None, (35, 70))


@dataclass(frozen=True)
class Case:
    """Parts of a tensor; all memory is a region of larger memory."""

    shape: tuple[int, int, int, int] = (2, 2, 70, 8)
    regions: tuple = (WHOLE, WHOLE)
    dtypes: tuple[torch.dtype, ...] = (BF16,)
    """Of the first part, and of the others."""
    target: torch.dtype | None = None
    """`None` is in place."""
    orders: tuple[Order, ...] = (TOKEN_MAJOR,)
    is_mean: bool = True
    has_sinks: bool = False
    head_dims: tuple[int, ...] = (0,)
    """Added to that of the shape, for each sum."""

    def sums(self, device: str) -> list[Accumulation]:
        torch.manual_seed(0)
        return [self._sum(more, device) for more in self.head_dims]

    def _sum(self, more: int, device: str) -> Accumulation:
        shape = (*self.shape[:3], self.shape[3] + more)
        partials = [self._part(number, shape, device) for number in range(len(self.regions))]
        if self.target is None:
            target, lse = partials[0].x, partials[0].lse
        else:
            target = self._filled(shape, self.target, self.orders[0], device)
            wide = torch.promote_types(self.dtypes[0], F32)
            lse = torch.full(shape[:3], torch.nan, dtype=wide).to(device) if self.is_mean else None
        sinks = torch.linspace(-3, 3, shape[1]).to(device) if self.has_sinks else None
        return Accumulation(target, partials, lse, sinks)

    def _part(self, number: int, shape: tuple[int, ...], device: str) -> Partial:
        region = self.regions[number]
        rows = torch.empty(shape[:3])[region].shape
        dtype, order = (x[min(number, len(x) - 1)] for x in (self.dtypes, self.orders))
        x = self._filled((*rows, shape[3]), dtype, order, device)
        if not self.is_mean:
            return Partial(region, x)
        lse = 30 * torch.randn(*rows[:2], rows[2] + 5)
        lse[:, :, 5 + 10 * number : 25 + 10 * number] = -torch.inf
        lse = lse.to(device, torch.promote_types(dtype, F32))[:, :, 5:]
        x.masked_fill_(lse.unsqueeze(-1) == -torch.inf, 0.0)
        # An infinite output, where a weight of 0 would make it NaN.
        first = 33 + 5 * number
        x[:, :, first : first + 5, 0] = (-1) ** number * torch.inf
        lse[:, :, 33:] = 1.0 + number
        return Partial(region, x, lse)

    @staticmethod
    def _filled(shape: Sequence[int], dtype: torch.dtype, order: Order, device: str) -> Tensor:
        """Rows 5 and later of a longer tensor."""
        batch, heads, rows, head_dim = shape
        longer = (batch, heads, rows + 5, head_dim)
        x = empty(torch.empty(0, dtype=dtype), longer, order)
        return x.copy_(torch.randn(longer)).to(device)[:, :, 5:]


WIDE = {"dtypes": (F32, BF16)}
CASES = {
    "": Case(**WIDE),
    "head-major": Case(orders=(HEAD_MAJOR,), **WIDE),
    "mixed": Case(orders=(HEAD_MAJOR, TOKEN_MAJOR), **WIDE),
    "odd": Case((1, 2, 33, 5), **WIDE),
    "one row": Case((2, 2, 1, 1), **WIDE),
    "no rows": Case((2, 2, 0, 8), **WIDE),
    "wide": Case((1, 1, 40, 200), dtypes=(F32,)),
    "to bfloat16": Case(target=BF16, **WIDE),
    "in bfloat16": Case(target=BF16),
    "float64": Case(dtypes=(F64,)),
    "four": Case(regions=(WHOLE,) * 4, target=BF16),
    "regions": Case(regions=(WHOLE, LATER, ROW), target=F32),
    "regions only": Case(regions=(LATER, ROW), target=BF16),
    "eight regions": Case(regions=(WHOLE, *(LATER,) * 6, ROW), **WIDE),
    "sinks": Case(regions=(LATER, ROW), target=BF16, has_sinks=True),
    "one with sinks": Case(regions=(WHOLE,), target=BF16, has_sinks=True),
}
CASES |= {
    f"sum of {name}": replace(case, is_mean=False)
    for name, case in CASES.items()
    if not case.has_sinks
}
SUM = Case(is_mean=False, **WIDE)
CASES |= {
    "two sums": replace(SUM, head_dims=(0, 0)),
    "two sums of other head dims": replace(SUM, head_dims=(0, 9)),
    "two new sums": replace(SUM, regions=(LATER, ROW), target=F32, head_dims=(0, 0)),
    "two sums of nothing": replace(SUM, regions=(), target=F32, head_dims=(0, 0)),
}


def check(case: Case, device: str) -> None:
    from dtensor_ring.compute.merge_triton import accumulate_sums as fused

    expected, actual = case.sums("cpu"), case.sums(device)
    accumulate_sums(*expected)
    fused(*actual)
    for one, wanted in zip(actual, expected, strict=True):
        close = {"rtol": 1e-5, "atol": 1e-5} if wanted.target.dtype != BF16 else {}
        torch.testing.assert_close(one.target.cpu(), wanted.target, **close, equal_nan=False)
        if wanted.lse is not None and one.lse is not None:
            torch.testing.assert_close(one.lse.cpu(), wanted.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_on_a_gpu(case: Case) -> None:
    check(case, "cuda")


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


class NoDriver:
    """Stands for that of a GPU, so that kernels are compiled for it without one."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


class Compiling:
    """In place of the kernel: a launch is compiled, not run."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.last: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._compile, grid=grid)

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        self.last = self.kernel.warmup(*args, **kwargs)

    @property
    def number(self) -> int:
        """Of variants."""
        return len(self.kernel.device_caches[0][0])


@contextmanager
def compiling(capability: int) -> Iterator[Compiling]:
    """The launches of a block are compiled for GPUs of that capability."""
    from triton.runtime import driver

    from dtensor_ring.compute import merge_triton

    found = Compiling(merge_triton._accumulate_sums)
    found.kernel.device_caches.clear()
    with (
        patch.object(driver, "_active", NoDriver(capability)),
        patch.object(merge_triton, "_accumulate_sums", found),
        patch.object(torch.cuda, "device_of", lambda x: nullcontext()),
    ):
        yield found
    found.kernel.device_caches.clear()


COMPILED = Case((1, 2, 70, 128), regions=(WHOLE, LATER, WHOLE), target=BF16)


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "case",
    [COMPILED, replace(SUM, shape=(1, 2, 70, 128), head_dims=(0, 0)), CASES["float64"]],
    ids=["mean", "two sums", "float64"],
)
def test_compiles_for_gpus(case: Case, capability: int) -> None:
    """Without one: down to machine code, with loads of 16 bytes."""
    from dtensor_ring.compute.merge_triton import accumulate_sums as fused

    with compiling(capability) as found:
        fused(*case.sums("cpu"))
        assert found.last.asm["cubin"]
    lines = [line.strip() for line in found.last.asm["ptx"].splitlines()]
    loads, stores = (
        [n for n, line in enumerate(lines) if f"{what}.global" in line] for what in ("ld", "st")
    )
    if case.shape[3] == 128:
        assert any("ld.global.v4" in line for line in lines)
        assert any("st.global.v" in line for line in lines)
    if case.is_mean:
        # All warps load each lse, and one of them overwrites it.
        assert any("bar.sync" in line for line in lines[max(loads) : min(stores)])


@needs_triton
@pytest.mark.parametrize("is_mean", [True, False])
def test_lengths_compile_nothing_new(is_mean: bool) -> None:
    """Those of a batch of documents differ from any other's."""
    from dtensor_ring.compute.merge_triton import accumulate_sums as fused

    with compiling(90) as found:
        for rows, first in ((4096, 2048), (4097, 1), (16, 3), (33, 17), (1, 0)):
            regions = WHOLE, region(None, (first, rows)), region(0, (0, rows - first))
            case = replace(COMPILED, shape=(1, 2, rows, 128), regions=regions, is_mean=is_mean)
            case = case if is_mean else replace(case, head_dims=(0, 0))
            fused(*(sum_of(case)))
            assert found.number == 1, (rows, first)
        fused(*(sum_of(replace(case, regions=(WHOLE,) * 4))))
        assert found.number == 1, "three parts are compiled as four"


def sum_of(case: Case) -> list[Accumulation]:
    """Of memory as kernels return it, not of regions of larger memory."""
    sums = case.sums("cpu")
    return [
        replace(
            x,
            partials=[
                partial if partial.lse is None else replace(partial, lse=partial.lse.contiguous())
                for partial in x.partials
            ],
            target=torch.empty(x.target.transpose(1, 2).shape, dtype=BF16).transpose(1, 2),
        )
        for x in sums
    ]


@needs_triton
def test_by_the_interpreter() -> None:
    """In a process of its own: Triton decides when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error", "-m", "tests.compute.test_merge_triton"]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=300)


if __name__ == "__main__":
    for each in CASES.values():
        check(each, "cpu")
