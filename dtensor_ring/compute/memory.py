"""Memory of `(B, N, L, H)` tensors: its order, regions and columns of it, and integers on devices.

A range costs a launch, a column of an index hardly anything: it is read next to what it is of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.ranges import Span
from dtensor_ring.planning.tile import Tile

Order = tuple[int, ...]
"""The dimensions, the one with the largest stride first."""

TOKEN_MAJOR: Order = (0, 2, 1, 3)
"""A transposed `(B, L, N, H)`, as the projections around an attention yield and want it."""

HEAD_MAJOR: Order = (0, 1, 2, 3)
"""The tokens of a head next to each other."""


def order_of(x: Tensor) -> Order:
    """The order of `x`, whose last stride is 1."""
    # Of equal strides, as in dimensions of size 1, the order of the dimensions stays.
    stride = x.stride()
    return (*sorted(range(x.ndim - 1), key=stride.__getitem__, reverse=True), x.ndim - 1)


def in_order(x: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
    """`x` in that dtype, dense and in that order; `x` itself where it is so already."""
    # Strides say it without a view, which costs the host as much as a small kernel.
    if x.dtype == dtype and x.stride() == strides(x.shape, order):
        return x
    if order == HEAD_MAJOR:
        return x.to(dtype).contiguous()
    return x.permute(order).to(dtype).contiguous().permute(_inverse(order))


def empty(
    like: Tensor, shape: Sequence[Any], order: Order, dtype: torch.dtype | None = None
) -> Tensor:
    """Memory of that shape, dense and in that order; device, and dtype if not given, as `like`."""
    return like.new_empty([shape[dim] for dim in order], dtype=dtype).permute(_inverse(order))


def strides(shape: Sequence[Any], order: Order) -> tuple[Any, ...]:
    """Strides of a dense tensor in that order."""
    result, stride = [1] * len(order), 1
    for dim in reversed(order):
        result[dim], stride = stride, stride * shape[dim]
    return tuple(result)


def _inverse(order: Order) -> Order:
    return tuple(order.index(dim) for dim in range(len(order)))


Region = tuple[slice, slice, slice]
"""An index of batch, heads and tokens."""
WHOLE: Region = (slice(None), slice(None), slice(None))


def rows_of(tile: Tile) -> Region:
    """Index of a tile's queries in `(B, N, L)`."""
    return region(tile.batch, tile.rows)


def cols_of(tile: Tile) -> Region:
    """Index of a tile's keys in `(B, N, C)`."""
    return region(tile.batch, tile.cols)


def part_of(x: Tensor, at: Region) -> Tensor:
    """A region of a tensor `(B, N, L, ...)`, as a view; the tensor itself if that is all of it."""
    batches, _, tokens = at
    if batches.start is not None:
        return x[at]
    return x if tokens.start is None else columns(x, (tokens.start, tokens.stop))


def columns(x: Tensor, span: Span) -> Tensor:
    """These tokens of a tensor `(B, N, L, ...)`, as a view; the tensor itself if that is all."""
    begin, end = span
    # A view costs the host as much as a small kernel, so none is made in vain.
    return x if end - begin == x.shape[2] else x.narrow(2, begin, end - begin)


def region(batch: int | None, tokens: Span) -> Region:
    """Index of these tokens in one batch row, or in all of them."""
    # A slice, not a number: the result keeps all its dimensions.
    rows = slice(None) if batch is None else slice(batch, batch + 1)
    return rows, slice(None), slice(*tokens)


class Numbers:
    """One or more lists of integers, copied to each device once.

    The tensors live as long as this object, which should live as long as its plan; for ever if a
    CUDA graph captured them, see `_CAPTURED`.

    >>> Numbers(torch.int32, (0, 3, 5)).on(torch.device("cpu"))
    (tensor([0, 3, 5], dtype=torch.int32),)
    """

    def __init__(self, dtype: torch.dtype, *lists: Sequence[int] | Tensor) -> None:
        self._dtype, self._lists = dtype, lists
        self._copies: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """A tensor of each list on the device."""
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        # All layers ask, and a copy makes the host wait: one for each device.
        if device not in self._copies:
            if is_captured:
                raise RuntimeError(NOT_THERE)
            self._copies[device] = self._copied(device)
        copies = self._copies[device]
        if is_captured:
            _CAPTURED.update(copies)
        elif device.type == "cuda":
            # Another stream allocated them: it must not reuse the memory while this one reads it.
            copies[0].record_stream(torch.cuda.current_stream(device))
        return copies

    def _copied(self, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors, complete when this returns."""
        # Not in inference mode: tensors made there cannot be saved for a backward pass.
        with torch.inference_mode(False):
            lists = [torch.as_tensor(x, dtype=self._dtype, device="cpu") for x in self._lists]
            if device.type != "cuda":
                return tuple(x.to(device) for x in lists)
            return _in_one_transfer(lists, device)


_CAPTURED: set[Tensor] = set()
"""What CUDA graphs read when they are replayed: nothing tells when the last of them has gone."""

NOT_THERE = (
    "a CUDA graph is being captured, and the boundaries of this attention are not on the GPU yet, "
    "where no capture can bring them; run the same attention, with its backward, once before"
)

ALIGNED = 16
"""Bytes, to whose multiples each list is moved."""


def _in_one_transfer(lists: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """The lists on a GPU, as views of one copy."""
    each = ALIGNED // lists[0].itemsize
    room = [-(-len(x) // each) * each for x in lists]
    joined = torch.empty(sum(room), dtype=lists[0].dtype, pin_memory=True)
    for part, x in zip(joined.split(room), lists, strict=True):
        part[: len(x)] = x
    # The host waits for this copy; on a side stream it waits for no queued kernels as well.
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        copy = joined.to(device, non_blocking=True)
    stream.synchronize()
    return tuple(part[: len(x)] for part, x in zip(copy.split(room), lists, strict=True))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device that numbers are copied on."""
    return torch.cuda.Stream(device)


FEW = 8
"""Ranges up to which one copy of each is as quick as one by an index."""

_INDICES: WeakKeyDictionary[Cols, Numbers] = WeakKeyDictionary()
"""The columns one by one, made once: they live as long as their plan."""


def pack(packed: Tensor, x: Tensor, cols: Cols) -> None:
    """Copy these columns of `x`, which become those of `packed`, side by side."""
    if len(cols.spans) <= FEW:
        for span, part in _parts(packed, cols):
            part.copy_(columns(x, span))
    elif packed.dtype == x.dtype:
        torch.index_select(x, 2, _index(cols, x.device), out=packed)
    else:
        packed.copy_(x.index_select(2, _index(cols, x.device)))


def unpack(x: Tensor, packed: Tensor, cols: Cols) -> None:
    """Copy columns that lie side by side to these columns of `x`."""
    if len(cols.spans) <= FEW:
        for span, part in _parts(packed, cols):
            columns(x, span).copy_(part)
    else:
        x.index_copy_(2, _index(cols, x.device), packed)


def add(total: Tensor, packed: Tensor, cols: Cols) -> None:
    """Add columns that lie side by side to these columns of a sum, rounded once.

    Args:
        total: the sum.
        packed: the columns to add; their dtype may differ from that of the sum.
        cols: where it is added.
    """
    if len(cols.spans) <= FEW:
        for span, part in _parts(packed, cols):
            columns(total, span).add_(part)
        return
    index = _index(cols, total.device)
    if packed.dtype == total.dtype:
        total.index_add_(2, index, packed)
    else:
        total.index_copy_(2, index, total.index_select(2, index).add_(packed))


def _parts(packed: Tensor, cols: Cols) -> Iterable[tuple[Span, Tensor]]:
    """Each span, and its part of the packed columns."""
    if len(cols.spans) == 1:
        return [(cols.spans[0], packed)]
    places = pairwise(cols.offsets)
    return [(span, columns(packed, at)) for span, at in zip(cols.spans, places, strict=True)]


def _index(cols: Cols, device: torch.device) -> Tensor:
    """The columns, one by one."""
    numbers = _INDICES.get(cols)
    if numbers is None:
        # Two threads may both get here; either result serves.
        numbers = _INDICES[cols] = Numbers(torch.int64, _listed(cols))
    return numbers.on(device)[0]


def _listed(cols: Cols) -> Tensor:
    """The indices of the columns, int64."""
    firsts, ends = torch.tensor(cols.spans, device="cpu").T
    # An index is the place among the packed columns, plus all gaps before its span.
    gaps = firsts - torch.tensor(cols.offsets[:-1], device="cpu")
    return torch.arange(len(cols), device="cpu") + gaps.repeat_interleave(ends - firsts)
