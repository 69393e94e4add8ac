"""The one launch gives what the other passes give: in Triton's interpreter, and on a GPU.

`test_merge_compiled.py` reads its machine code.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python names since 3.13."""
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
FEW = ("mixed", "odd", "no rows", "wide", "float64", "regions only", "eight regions", "sinks")
FEW += ("sum of mixed", "sum of in bfloat16", "sum of four", "sum of regions")
FEW += ("two sums of other head dims", "two new sums", "two sums of nothing")


def check(case: Case, device: str) -> None:
    compare(case.sums(device), case.sums("cpu"))


def compare(actual: list[Accumulation], expected: list[Accumulation]) -> None:
    from dtensor_ring.compute.merge_triton import accumulate_sums as fused

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


JUST_32_BITS = 2**29 - 8
"""The largest stride that the kernel gets as an integer of 32 bits, as it travels times 4."""
FAR = {
    "batch": ((6, 1, 3, 5), 0, JUST_32_BITS),
    "heads": ((1, 6, 3, 5), 1, JUST_32_BITS),
    "rows": ((1, 1, 40, 5), 2, 2**26),
    "rows of 16 bytes": ((1, 1, 40, 8), 2, 2**26),
    "a stride": ((2, 1, 3, 8), 0, 2**31 + 2**30),
}
"""Shapes, and a dimension with its stride: its last index is beyond 2**31 numbers."""


class Distant:
    """Memory of 16 GiB. A machine gives only the pages that are touched, which are few."""

    def __init__(self, dim: int, stride: int) -> None:
        self._dim, self._stride = dim, stride
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self._memory = torch.frombuffer(mmap.mmap(-1, 1 << 34, flags=flags), dtype=torch.uint8)
        self._copies: dict[Tensor, Tensor] = {}

    def move(self, one: Accumulation) -> Accumulation:
        partials = [replace(x, x=self._moved(x.x), lse=self._moved(x.lse)) for x in one.partials]
        lse, target = self._moved(one.lse), self._moved(one.target)
        return replace(one, target=target, partials=partials, lse=lse)

    def _moved(self, x: Any) -> Any:
        """Return the copy of a tensor, the same one each time."""
        if x is not None and x not in self._copies:
            strides = list(x.contiguous().stride())
            strides[self._dim] = self._stride
            # Tensors begin 64 KiB apart, and lie between each other's rows.
            first = (len(self._copies) << 16) // x.itemsize
            self._copies[x] = self._memory.view(x.dtype).as_strided(x.shape, strides, first)
            self._copies[x].copy_(x)
        return self._copies.get(x)


def check_far(shape: tuple[int, int, int, int], dim: int, stride: int) -> None:
    """Offsets that are computed in 32 bits are addresses outside of the memory."""
    from triton.runtime.interpreter import GridExecutor

    case = Case(shape, **WIDE)
    memory = Distant(dim, stride)
    # The interpreter would copy all the memory onto itself.
    with patch.object(GridExecutor, "_restore_args_dev", lambda *_: None):
        compare([memory.move(one) for one in case.sums("cpu")], case.sums("cpu"))


@contextmanager
def patched_once() -> Iterator[None]:
    """Triton's interpreter replaces its language at each call of a device function; here once.

    It takes much longer than what such a function computes.
    """
    from triton.runtime import interpreter

    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def first(function: Any) -> Any:
        """Patch each module once: modules bind the names of the language separately."""
        if function.__module__ in patched:
            return None
        patched.add(function.__module__)
        return patch_language(function)

    def launched(*arguments: Any, **options: Any) -> None:
        patched.clear()  # the last launch has restored the language
        launch(*arguments, **options)

    with (
        patch.object(interpreter, "_patch_lang", first),
        patch.object(interpreter.GridExecutor, "__call__", launched),
    ):
        yield


def check_in_the_interpreter(names: Sequence[str]) -> None:
    """`tests/interpreted.py` calls it."""
    with patched_once():
        for each in names:
            check(CASES[each], "cpu")
        for far in FAR.values():
            check_far(*far)
