"""Memory of `(B, N, L, H)` tensors: in which order it lies, and regions of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor_ring.planning.tile import Tile
from dtensor_ring.planning.values.span import Span

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
