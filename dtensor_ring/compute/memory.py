"""Memory order, regions, columns and parts of `(B, N, L, H)` tensors, and lists of integers.

Columns are copied range by range, with a launch each, or by an index, in one launch for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dtensor_ring.compute.capture import RUN_ONCE, keep_captured, refuse_capture
from dtensor_ring.compute.trace import note_pass
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Run
from dtensor_ring.planning.ranges import Span
from dtensor_ring.planning.tile import Tile

# Dimensions of a tensor by descending stride.
Order = tuple[int, ...]

# Memory is a contiguous `(B, L, N, H)`, the layout of the projections around an attention.
TOKEN_MAJOR: Order = (0, 2, 1, 3)

# Memory is a contiguous `(B, N, L, H)`: the tokens of a head are adjacent.
HEAD_MAJOR: Order = (0, 1, 2, 3)


def order_of(x: Tensor) -> Order:
    """Return the memory order of `x`, whose last stride is 1."""
    # The sort is stable: dimensions of equal stride, such as those of size 1, keep their order.
    stride = x.stride()
    return (*sorted(range(x.ndim - 1), key=stride.__getitem__, reverse=True), x.ndim - 1)


def in_order(x: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
    """Return `x` dense, in this order and dtype; without a copy if it already is."""
    # Compare strides first: even a view costs the host as much as a small kernel.
    if x.dtype == dtype and x.stride() == dense_strides(x.shape, order):
        return x
    if order == HEAD_MAJOR:
        return x.to(dtype).contiguous()
    return x.permute(order).to(dtype).contiguous().permute(_inverse(order))


def empty(
    like: Tensor, shape: Sequence[Any], order: Order, dtype: torch.dtype | None = None
) -> Tensor:
    """Allocate a dense tensor in this order, with the device (and by default dtype) of `like`."""
    if order == HEAD_MAJOR:  # a view costs the host as much as a small kernel
        return new_empty(like, shape, dtype)
    return new_empty(like, [shape[dim] for dim in order], dtype).permute(_inverse(order))


def new_empty(like: Tensor, shape: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a contiguous tensor with the device (and by default dtype) of `like`."""
    if like.is_meta:  # the method is Python there, and takes ten times as long
        return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
    return like.new_empty(shape, dtype=dtype)


def strides(shape: Sequence[Any], order: Order) -> tuple[Any, ...]:
    """Return the strides of a dense tensor in this order."""
    result, stride = [1] * len(order), 1
    for dim in reversed(order):
        result[dim], stride = stride, stride * shape[dim]
    return tuple(result)


@lru_cache(maxsize=1024)
def dense_strides(shape: torch.Size, order: Order) -> tuple[int, ...]:
    """Return the strides of a dense tensor of a known shape: layers repeat the same shapes."""
    return strides(shape, order)


@cache
def _inverse(order: Order) -> Order:
    return tuple(order.index(dim) for dim in range(len(order)))


@cache
def wide_of(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of these dtypes are added: float32 or wider.

    >>> wide_of(torch.bfloat16)
    torch.float32
    """
    return reduce(torch.promote_types, dtypes, torch.float32)


# An index of batch rows, heads and tokens.
Region = tuple[slice, slice, slice]
WHOLE: Region = (slice(None), slice(None), slice(None))


def rows_of(tile: Tile) -> Region:
    """Return the index of a tile's queries in `(B, N, L)`."""
    return region(tile.batch, tile.rows)


def cols_of(tile: Tile) -> Region:
    """Return the index of a tile's keys in `(B, N, C)`."""
    return region(tile.batch, tile.cols)


def part_of(x: Tensor, where: Region) -> Tensor:
    """Return a region of `(B, N, L, ...)` as a view, or `x` itself if the region is all of it."""
    batches, _, tokens = where
    if batches.start is not None:
        return x[where]
    begin, end = tokens.start, tokens.stop
    # As `columns`, which would be another call of each launch for each of its tensors.
    return x if begin is None or end - begin == x.shape[2] else x.narrow(2, begin, end - begin)


def parts_of(where: Region, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a region of tensors of one length as views, or the tensors, see `part_of`."""
    batches, _, tokens = where
    if batches.start is not None:
        return [x[where] for x in tensors]
    begin, end = tokens.start, tokens.stop
    if begin is None or end - begin == tensors[0].shape[2]:
        return tensors
    return [x.narrow(2, begin, end - begin) for x in tensors]


def columns(x: Tensor, span: Span) -> Tensor:
    """Return a span of tokens of `(B, N, L, ...)` as a view, or `x` itself if it is all of them."""
    begin, end = span
    # A view costs the host as much as a small kernel, so avoid a useless one.
    return x if end - begin == x.shape[2] else x.narrow(2, begin, end - begin)


def region(batch: int | None, tokens: Span) -> Region:
    """Return the index of these tokens in one batch row, or in all rows if `batch` is `None`."""
    begin, end = tokens
    # A slice instead of a number keeps the batch dimension.
    rows = slice(None) if batch is None else slice(batch, batch + 1)
    return rows, slice(None), slice(begin, end)


def box_region(batches: Span, tokens: Span, batch_size: int) -> Region:
    """Return the index of these tokens in these batch rows; `batch_size` rows are no index.

    >>> box_region((0, 2), (3, 4), batch_size=2)[0], box_region((0, 1), (3, 4), batch_size=2)[0]
    (slice(None, None, None), slice(0, 1, None))
    """
    (first_row, end_row), (begin, end) = batches, tokens
    # A view costs the host as much as a small kernel, so all batch rows are no index.
    rows = slice(None) if batches == (0, batch_size) else slice(first_row, end_row)
    return rows, slice(None), slice(begin, end)


def positions_of(runs: Sequence[Run], device: torch.device | None = None) -> Tensor:
    """Return the positions of runs, see `Layout.runs`, int64, `(L,)`.

    Example:
        >>> positions_of(Striped().runs(rank=1, world_size=2, seq_len=6)).tolist()
        [1, 3, 5]
    """
    parts = [
        torch.arange(x.start, x.start + x.length * x.stride, x.stride, device=device) for x in runs
    ]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


class Numbers:
    """One or more lists of integers, or tensors of any shape, copied to each device once.

    The tensors live as long as this object, which should live as long as its plan. Tensors that a
    CUDA graph has captured live for ever, see `keep_captured`.

    >>> Numbers(torch.int32, (0, 3, 5)).on(torch.device("cpu"))
    (tensor([0, 3, 5], dtype=torch.int32),)
    """

    def __init__(self, dtype: torch.dtype, *lists: Sequence[int] | Tensor) -> None:
        self._dtype, self._lists = dtype, lists
        self._copies: dict[torch.device, tuple[Tensor, ...]] = {}

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the lists and of one copy, in bytes; lists have 8 for a number."""
        return 1000 + 16 * sum(x.numel() if isinstance(x, Tensor) else len(x) for x in self._lists)

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return each list as a tensor on the device."""
        # A copy makes the host wait and all layers need it, so copy once for each device.
        if device not in self._copies:
            refuse_capture(device, "boundaries of this attention are not on the GPU yet", RUN_ONCE)
            self._copies[device] = self._copied(device)
        copies = self._copies[device]
        if not keep_captured(device, copies) and device.type == "cuda":
            # A side stream allocated the memory of all views; keep it while this stream reads it.
            copies[0].record_stream(torch.cuda.current_stream(device))
        return copies

    def _copied(self, device: torch.device) -> tuple[Tensor, ...]:
        """Copy the lists to the device. The copies are complete when this returns."""
        # Leave inference mode: tensors made there cannot be saved for a backward pass.
        with torch.inference_mode(False):
            lists = [torch.as_tensor(x, dtype=self._dtype, device="cpu") for x in self._lists]
            if device.type != "cuda":
                return tuple(x.to(device) for x in lists)
            return _in_one_transfer(lists, device)


# Alignment of each list in the joint copy, in bytes.
ALIGNED = 16


def _in_one_transfer(lists: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Copy the lists to a GPU in one transfer, and return views of it."""
    each = ALIGNED // lists[0].itemsize
    room = [-(-x.numel() // each) * each for x in lists]
    joined = torch.empty(sum(room), dtype=lists[0].dtype, pin_memory=True)
    for part, x in zip(joined.split(room), lists, strict=True):
        part[: x.numel()] = x.flatten()
    # The host waits for this copy. On a side stream it does not wait for queued kernels, too.
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        copy = joined.to(device, non_blocking=True)
    stream.synchronize()
    return tuple(
        part[: x.numel()].view(x.shape) for part, x in zip(copy.split(room), lists, strict=True)
    )


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the device's stream for copies of `Numbers`."""
    return torch.cuda.Stream(device)


# The largest number of ranges for which copies range by range are as fast as a copy by an index.
FEW = 8

# The index of each `Cols`. The keys are weak, so an index lives as long as its plan.
_INDICES: WeakKeyDictionary[Cols, Numbers] = WeakKeyDictionary()


def pack(packed: Tensor, x: Tensor, cols: Cols) -> None:
    """Copy these columns of `x` side by side into `packed`."""
    if packed.is_meta:
        return note_pass("pack", packed.numel() * (packed.itemsize + x.itemsize))
    if len(cols.spans) <= FEW:
        for span, part in _parts(packed, cols):
            part.copy_(columns(x, span))
    elif packed.dtype == x.dtype:
        torch.index_select(x, 2, _index(cols, x.device), out=packed)
    else:
        # The gather cannot convert to another dtype, so its result is copied.
        packed.copy_(x.index_select(2, _index(cols, x.device)))


def unpack(x: Tensor, packed: Tensor, cols: Cols) -> None:
    """Copy the columns of `packed`, which lie side by side, to these columns of `x`."""
    if packed.is_meta:
        return note_pass("unpack", packed.numel() * (packed.itemsize + x.itemsize))
    if len(cols.spans) <= FEW:
        for span, part in _parts(packed, cols):
            columns(x, span).copy_(part)
    else:
        x.index_copy_(2, _index(cols, x.device), packed)


def add(total: Tensor, packed: Tensor, cols: Cols) -> None:
    """Add columns that lie side by side to these columns of a sum, which rounds once.

    Args:
        total: the sum.
        packed: the columns to add, in the dtype of the sum or another.
        cols: places of the columns in the sum.
    """
    if packed.is_meta:
        return note_pass("add", packed.numel() * (packed.itemsize + 2 * total.itemsize))
    if len(cols.spans) <= FEW:
        for span, part in _parts(packed, cols):
            columns(total, span).add_(part)
        return
    index = _index(cols, total.device)
    # The op adds in one dtype only; a sum that is converted first would be rounded twice.
    if packed.dtype == total.dtype:
        total.index_add_(2, index, packed)
    else:
        total.index_copy_(2, index, total.index_select(2, index).add_(packed))


def _parts(packed: Tensor, cols: Cols) -> Iterable[tuple[Span, Tensor]]:
    """Return each span with its part of the packed columns."""
    if len(cols.spans) == 1:
        return ((cols.spans[0], packed),)
    places = pairwise(cols.offsets)
    return [(span, columns(packed, where)) for span, where in zip(cols.spans, places, strict=True)]


def _index(cols: Cols, device: torch.device) -> Tensor:
    """Return the index tensor of the columns, which is made once."""
    numbers = _INDICES.get(cols)
    if numbers is None:
        # Two threads may both get here; either result serves.
        numbers = _INDICES[cols] = Numbers(torch.int64, listed(cols))
    return numbers.on(device)[0]


def listed(cols: Cols) -> Tensor:
    """Return the index of every column, int64."""
    spans = torch.tensor(cols.spans, dtype=torch.int64, device="cpu")
    firsts, ends = spans.view(len(cols.spans), 2).T
    # Spans (2, 4) and (7, 9): places 0 1 2 3 plus gaps 2 2 5 5 are the columns 2 3 7 8.
    # The index of a column is its place among the packed columns, plus all gaps before its span.
    gaps = firsts - torch.tensor(cols.offsets[:-1], dtype=torch.int64, device="cpu")
    return torch.arange(len(cols), device="cpu") + gaps.repeat_interleave(ends - firsts)


@dataclass(slots=True, eq=False)  # not frozen, which takes twice as long to make one
class Partial:
    """A partial result for a region of `(B, N, L)`.

    Attributes:
        region: the region.
        x: gradients or outputs `(B', N, R, H)`.
        lse: log-sum-exp `(B', N, R)` of outputs.
        denominator: `(B', N, R)`. `x` must still be divided by it, and its logarithm added to
            `lse`; see Note [Division at the end].
    """

    region: Region
    x: Tensor
    lse: Tensor | None = None
    denominator: Tensor | None = None

    def spans(self, shape: Sequence[int]) -> tuple[Span, Span]:
        """Return the ranges of batch rows and of tokens in a tensor of this shape."""
        batches, _, tokens = self.region
        return batches.indices(shape[0])[:2], tokens.indices(shape[2])[:2]


@dataclass(slots=True, eq=False)
class Accumulation:
    """A target, and the partials whose sum or mean is written to it.

    Without `lse`, the partials are added. With `lse`, they are outputs over disjoint keys and merge
    to a mean: `lse' = log(sum(exp(lse)))` and `x' = sum(x * exp(lse - lse'))` (Milakov and
    Gimelshein, 2018, arXiv 1805.02867). A row without partials becomes 0, with an lse of -inf.
    Arithmetic is float32 or wider, and rounds once.

    Attributes:
        target: `(B, N, L, H)`, overwritten; it may be the memory of the first partial.
        partials: partial results whose last stride is 1.
        lse: `(B, N, L)`, overwritten; it may be that of the first partial, and is if `target` is.
        sinks: one logit for each head `(N,)`, a score with a value of 0.
        denominator: `(B, N, L)`, on CPUs only: that of the first partial if `lse` is its memory,
            else ones. It is updated; `target` is not divided by it yet.
    """

    target: Tensor
    partials: Sequence[Partial]
    lse: Tensor | None = None
    sinks: Tensor | None = None
    denominator: Tensor | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether the first partial is the target."""
        return bool(self.partials) and self.partials[0].x is self.target

    def cropped(self) -> Accumulation:
        """Return this sum without leading and trailing rows that no partial changes."""
        # A step of packed documents may change few rows. In a running total the others are right
        # already, and a pass over them would take as long as one that changes them.
        # A new target has to be written as a whole, and so has one that sinks or a division change.
        if self.sinks is not None or not self.is_in_place or self._divides:
            return self
        num_rows = self.target.shape[2]
        for partial in self.partials[1:]:
            if partial.x.shape[2] == num_rows:
                return self
        spans = [partial.spans(self.target.shape)[1] for partial in self.partials[1:]]
        rows = min([x[0] for x in spans], default=0), max([x[1] for x in spans], default=0)
        if rows == (0, num_rows):
            return self
        target, lse, denominator = columns(self.target, rows), self.lse, self.denominator
        lse = None if lse is None else columns(lse, rows)
        denominator = None if denominator is None else columns(denominator, rows)
        # The target itself comes first, as in an accumulation of all rows.
        partials = [Partial(WHOLE, target, lse, denominator)]
        partials += [
            Partial(
                (partial.region[0], partial.region[1], slice(first - rows[0], end - rows[0])),
                partial.x,
                partial.lse,
            )
            for partial, (first, end) in zip(self.partials[1:], spans, strict=True)
        ]
        return Accumulation(target, partials, lse, None, denominator)

    @property
    def _divides(self) -> bool:
        """Whether the sum divides the target, which changes all its rows."""
        return self.denominator is None and self.partials[0].denominator is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass over memory reads and writes, without those of lse."""
        return self.target.nbytes + sum(partial.x.nbytes for partial in self.partials)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        dtype = self.target.dtype
        return wide_of(dtype, self.partials[0].x.dtype if self.partials else dtype)
