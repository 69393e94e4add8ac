"""Sums of the launches' gradients: for the rank's own shard, and for shards in transit."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.compute.memory import (
    TOKEN_MAJOR,
    WHOLE,
    Region,
    WriteTracker,
    empty,
    in_order,
)
from dtensor_ring.compute.ranges import add
from dtensor_ring.planning.columns import Cols


class GradientSum:
    """The sum of the launches' gradients of one tensor `(B, N, L, H)`.

    A single gradient that covers the whole tensor is kept without a copy. A sum of several is
    float32 or wider.

    Args:
        like: the tensor: its shape, dtype and device.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None
        self._filled = WriteTracker(like.shape)

    def add(self, at: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, L)`."""
        if self._total is None and grad.shape == self._like.shape:
            # Often one launch returns all there is: its memory is the sum, without a copy.
            self._total = grad
            self._filled.fill()
            return
        # Several gradients add up, so the sum must be wide from here on.
        self._filled.add(self._wide(), at, grad)

    def add_arrived(self, arrived: Tensor, cols: Cols, is_last: bool) -> None:
        """Add what other ranks summed up for these columns, and round after the last of it.

        Args:
            arrived: the columns side by side.
            cols: where in the tensor they are.
            is_last: whether nothing else is added.
        """
        # Adding to narrow memory rounds: exact enough only once, with the last addend.
        narrow = self._total if is_last else None
        total = self._wide() if narrow is None else narrow
        add(total, self._filled, arrived, cols)

    def total(self) -> Tensor:
        """The sum so far, float32 or wider unless it is a single launch's."""
        total = self._wide() if self._total is None else self._total
        self._filled.finish(total)
        return total

    def result(self) -> Tensor:
        """The sum in the tensor's dtype, token-major."""
        return in_order(self.total(), TOKEN_MAJOR, self._like.dtype)

    def _wide(self) -> Tensor:
        """The memory to add to, float32 or wider; a narrow sum so far is cast."""
        like, wide = self._like, torch.promote_types(self._like.dtype, torch.float32)
        if self._total is None:
            self._total = empty(like, like.shape, TOKEN_MAJOR, wide)
        elif self._total.dtype != wide:
            self._total = self._total.to(wide)
        return self._total


class GradientShare:
    """A step's gradients of a shard in transit, until the sum over the other ranks arrives.

    The launches' gradients are kept as they are, and summed once they outgrow the shard.

    Args:
        like: the part of the shard `(B, N, C, H)`: its shape, dtype and device.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._grads: list[tuple[Region, Tensor]] = []

    def add(self, at: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, C)`."""
        self._grads.append((at, grad))
        # Many overlapping launches would hold many shards' worth of memory.
        if sum(x.numel() for _, x in self._grads) > self._like.numel():
            total = GradientSum(self._like)
            for kept in self._grads:
                total.add(*kept)
            self._grads = [(WHOLE, total.total())]

    def add_to(self, total: Tensor, first: bool) -> None:
        """Add to the sum, or begin it: then `total` is memory that nothing was written to."""
        # A sum that arrived is complete memory; a new one has arbitrary content.
        filled = WriteTracker(total.shape, is_full=not first)
        for at, grad in self._grads:
            filled.add(total, at, grad)
        filled.finish(total)
