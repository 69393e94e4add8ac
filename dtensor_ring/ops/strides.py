"""Memory that kernels can read: what a caller's views may lack."""

from __future__ import annotations

from torch import Tensor

from dtensor_ring.compute.memory import empty, order_of

ALIGNMENT = 16
"""Bytes that kernels of GPUs load at once; where a row begins elsewhere, some fail or read wrong.

Flash attention 2 and 3, PyTorch's own among them, do not check it."""


def unit_stride(*tensors: Tensor) -> list[Tensor]:
    """The tensors with a last stride of 1: kernels rely on it, and not all of them check."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def loadable(*tensors: Tensor) -> list[Tensor]:
    """The tensors with a last stride of 1 and, on a GPU, with aligned rows; copied if need be."""
    return [_moved(x) if x.is_cuda and not is_aligned(x) else x for x in unit_stride(*tensors)]


def is_aligned(x: Tensor) -> bool:
    """Whether rows begin at multiples of `ALIGNMENT`; no copy helps if they are no multiples."""
    size = x.itemsize
    if x.shape[-1] * size % ALIGNMENT:
        return True
    steps = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    # The stride of one row leads nowhere.
    misses = any(length > 1 and stride * size % ALIGNMENT for length, stride in steps)
    return not misses and not x.data_ptr() % ALIGNMENT


def _moved(x: Tensor) -> Tensor:
    """A dense copy in the same order of memory, which decides that of the output."""
    return empty(x, x.shape, order_of(x)).copy_(x)
