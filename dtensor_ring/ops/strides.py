"""Copies a caller's views into memory that kernels can read, where necessary."""

from __future__ import annotations

from torch import Tensor

from dtensor_ring.compute.memory import empty, order_of

# GPU kernels load this many bytes at once. If a row is not aligned, some fail or read wrong values;
# flash attention 2 and 3, including PyTorch's own, do not check it.
ALIGNMENT = 16


def unit_stride(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with a last stride of 1, which kernels rely on and not all check."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def loadable(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with a last stride of 1 and, on a GPU, aligned rows; copy if necessary."""
    return [_moved(x) if x.is_cuda and not is_aligned(x) else x for x in unit_stride(*tensors)]


def is_aligned(x: Tensor) -> bool:
    """Return whether rows are aligned, or have a length that no dense copy could align."""
    size = x.itemsize
    if x.shape[-1] * size % ALIGNMENT:
        return True
    steps = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    # The stride of a dim of length 1 is never used.
    misses = any(length > 1 and stride * size % ALIGNMENT for length, stride in steps)
    return not misses and not x.data_ptr() % ALIGNMENT


def _moved(x: Tensor) -> Tensor:
    """Return a dense copy in the same memory order, which decides the order of the output."""
    return empty(x, x.shape, order_of(x)).copy_(x)
