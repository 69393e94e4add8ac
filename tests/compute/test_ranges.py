"""Columns that are copied and added, against an index written out."""

from __future__ import annotations

import gc

import pytest
import torch

from dtensor_ring.compute import memory
from dtensor_ring.compute.accumulate import GradientSum
from dtensor_ring.compute.memory import region
from dtensor_ring.planning.demand import Cols
from tests.columns import cols_of, indices_of

COLS = {
    "one": Cols(((2, 7),)),
    "few": Cols(((0, 1), (4, 6), (60, 64))),
    "many": Cols(tuple((i, i + 1 + i % 3) for i in range(1, 60, 4))),
    "all": Cols(((0, 64),)),
}
EACH = pytest.mark.parametrize("cols", COLS.values(), ids=list(COLS))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_columns(cols: Cols, dtype: torch.dtype) -> None:
    x = torch.randn(2, 64, 3, 4).transpose(1, 2)
    packed = torch.empty(2, 3, len(cols), 4, dtype=dtype)
    memory.pack(packed, x, cols)
    assert torch.equal(packed, x[:, :, indices_of(cols)].to(dtype))


@pytest.mark.pairs
@EACH
@pytest.mark.parametrize("num_written", [0, 30, 64])
@pytest.mark.parametrize("num_sums", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sum_dtype", [torch.float32, torch.bfloat16])
def test_added_columns(
    cols: Cols, num_written: int, num_sums: int, dtype: torch.dtype, sum_dtype: torch.dtype
) -> None:
    """Rounded once, whatever was written before; the rest stays, or is zero."""
    own = torch.randn(2, 3, num_written, 4).to(dtype)
    arrived = torch.randn(2, 3, len(cols), 4).to(sum_dtype)
    expected = torch.zeros(2, 3, 64, 4)
    expected[:, :, :num_written] = own.float()
    total = GradientSum(torch.empty(2, 3, 64, 4, dtype=dtype))
    total.add(region(None, (0, num_written)), own)
    for number in range(1, num_sums + 1):
        expected[:, :, indices_of(cols)] += arrived.float()
        total.add_arrived(arrived, cols, is_last=number == num_sums)
    assert torch.equal(total.result(), expected.to(dtype))


def test_indices_die_with_their_plan() -> None:
    gc.collect()
    before = len(memory._INDICES)
    cols = cols_of(range(0, 100, 2))
    x = torch.randn(1, 1, 100, 2)
    for _ in range(2):
        memory.pack(torch.empty(1, 1, 50, 2), x, cols)
    assert len(memory._INDICES) == before + 1
    del cols
    gc.collect()
    assert len(memory._INDICES) == before
