"""Numbers of a plan on a GPU: one pinned transfer, and memory that captured graphs keep."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dtensor_ring.compute import capture
from dtensor_ring.compute import memory as numbers
from dtensor_ring.compute.memory import ALIGNED, Numbers

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
