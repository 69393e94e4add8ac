"""In which order the dimensions of a `(B, N, L, H)` tensor lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Order = tuple[int, ...]
"""The dimensions, the one with the largest stride first."""

TOKEN_MAJOR: Order = (0, 2, 1, 3)
"""A transposed `(B, L, N, H)`, as the projections around an attention yield and want it."""

HEAD_MAJOR: Order = (0, 1, 2, 3)
"""The tokens of a head next to each other."""


def order_of(x: Tensor) -> Order:
    """The order of `x`, whose last stride is 1."""
    return (*sorted(range(x.ndim - 1), key=x.stride, reverse=True), x.ndim - 1)


def in_order(x: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
    """`x` in that dtype, dense and in that order; `x` itself where it is so already."""
    return x.permute(order).to(dtype).contiguous().permute(_inverse(order))


def empty(
    like: Tensor, shape: Sequence[Any], order: Order, dtype: torch.dtype | None = None
) -> Tensor:
    """Memory of that shape, dense and in that order; device, and dtype if not given, as `like`."""
    return like.new_empty([shape[dim] for dim in order], dtype=dtype).permute(_inverse(order))


def strides(shape: Sequence[Any], order: Order) -> tuple[Any, ...]:
    """Those of a dense tensor in that order."""
    result, stride = [1] * len(order), 1
    for dim in reversed(order):
        result[dim], stride = stride, stride * shape[dim]
    return tuple(result)


def _inverse(order: Order) -> Order:
    return tuple(order.index(dim) for dim in range(len(order)))
