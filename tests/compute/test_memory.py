"""Columns, numbers and the order of dimensions in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import permutations
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dtensor_ring.compute import capture, memory
from dtensor_ring.compute import memory as numbers
from dtensor_ring.compute.accumulate import GradientSum
from dtensor_ring.compute.memory import (
    ALIGNED,
    TOKEN_MAJOR,
    Numbers,
    Order,
    empty,
    in_order,
    order_of,
    region,
    strides,
)
from dtensor_ring.planning.demand import Cols
from tests.columns import cols_of, indices_of

LISTS = (0, 3, 5), (0, 0, 4, 9, 12), (7,)


class Moves:
    """Copies to a GPU, which stay where they are."""

    def __init__(self) -> None:
        self.pinned = self.copied = self.recorded = 0
        self.is_capturing = False

    def empty(self, size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        self.pinned += pin_memory
        return torch.zeros(size, dtype=dtype)

    def to(self, x: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        assert non_blocking
        self.copied += 1
        return x.clone()

    def record(self, x: Tensor, stream: object) -> None:
        self.recorded += 1


class Stream:
    def __init__(self, device: object) -> None:
        self.is_complete = False

    def synchronize(self) -> None:
        self.is_complete = True


@pytest.fixture
def moves() -> Iterator[Moves]:
    """A GPU that is played: what would go there is counted."""
    from contextlib import nullcontext

    moves, streams = Moves(), {}

    def stream_of(device: Any) -> Stream:
        return streams.setdefault(device, Stream(device))

    with (
        patch.object(torch, "empty", moves.empty),
        patch.object(Tensor, "to", lambda *args, **kwargs: moves.to(*args, **kwargs)),
        patch.object(Tensor, "record_stream", lambda x, stream: moves.record(x, stream)),
        patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
        patch.object(torch.cuda, "current_stream", lambda device: None),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: moves.is_capturing),
        patch.object(numbers, "_side_stream", stream_of),
        patch.object(capture, "_CAPTURED", set()),
    ):
        yield moves
    assert all(stream.is_complete for stream in streams.values())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_come_in_one_pinned_transfer(moves: Moves, dtype: torch.dtype) -> None:
    made = Numbers(dtype, *LISTS)
    device = torch.device("cuda")
    first, again = made.on(device), made.on(device)
    assert (moves.pinned, moves.copied, moves.recorded) == (1, 1, 2)
    assert [x.tolist() for x in first] == [list(x) for x in LISTS]
    assert all(x is y for x, y in zip(first, again, strict=True))
    assert {x.dtype for x in first} == {dtype}
    begin = first[0].data_ptr()
    assert all((x.data_ptr() - begin) % ALIGNED == 0 for x in first)


def test_tensors_keep_their_shapes(moves: Moves) -> None:
    tables, lengths = torch.arange(6).view(2, 3), torch.tensor([3, 5])
    found = Numbers(torch.int32, tables, lengths).on(torch.device("cuda"))
    assert [x.tolist() for x in found] == [tables.tolist(), lengths.tolist()]


def test_what_a_graph_captured_stays(moves: Moves) -> None:
    """A replay reads it, however long the plan is gone."""
    kept, dropped = (Numbers(torch.int32, *LISTS) for _ in range(2))
    device = torch.device("cuda")
    memory = [weakref.ref(x.on(device)[0]) for x in (kept, dropped)]
    moves.is_capturing = True
    kept.on(device)
    del kept, dropped
    gc.collect()
    assert [x() is not None for x in memory] == [True, False]


def test_a_capture_brings_nothing(moves: Moves) -> None:
    moves.is_capturing = True
    with pytest.raises(RuntimeError, match="once before"):
        Numbers(torch.int32, *LISTS).on(torch.device("cuda"))
    assert not moves.copied


# Orders of dimensions in memory, against torch's own strides.

SHAPE = 2, 3, 5, 4
ORDERS = [(*order, 3) for order in permutations(range(3))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_is_kept(order: Order, dtype: torch.dtype) -> None:
    x = torch.randn(SHAPE).bfloat16()
    result = in_order(x, order, dtype)
    assert (result.dtype, order_of(result)) == (dtype, order)
    assert torch.equal(result, x.to(dtype))
    assert result.stride() == strides(SHAPE, order)
    assert in_order(result, order, dtype).data_ptr() == result.data_ptr(), "no copy"
    for made in (empty(result, SHAPE, order), empty(x, SHAPE, order, dtype)):
        assert (made.shape, made.stride(), made.dtype) == (SHAPE, result.stride(), dtype)


def test_names() -> None:
    projected = torch.randn(2, 5, 3, 4).transpose(1, 2)
    assert order_of(projected) == TOKEN_MAJOR
    assert order_of(torch.randn(SHAPE)) == (0, 1, 2, 3)
    assert order_of(torch.randn(SHAPE)[:, :, ::2]) == (0, 1, 2, 3), "gaps do not matter"
    assert order_of(torch.randn(2, 3, 5)) == (0, 1, 2), "lse"


# Columns that are copied and added, against an index written out.

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
