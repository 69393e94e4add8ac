"""Sums of the tiles' gradients: of what a rank owns, and of what passes by."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.filled import Filled
from dtensor_ring.order import TOKEN_MAJOR, empty, in_order
from dtensor_ring.region import WHOLE, Region, region
from dtensor_ring.tile import Span


class GradientSum:
    """The sum of the tiles' gradients of one tensor `(B, N, L, H)`.

    A single tile that covers everything is kept as it is; a sum of more is float32 or wider.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None
        self._filled = Filled(like.shape)

    def add(self, at: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, L)`."""
        if self._total is None and grad.shape == self._like.shape:
            self._total, self._filled = grad, Filled(grad.shape, is_full=True)
            return
        self._filled.add(self._wide(), at, grad)

    def add_home(self, home: Tensor, cols: Span, is_last: bool) -> None:
        """Add what other ranks summed up for these columns; rounds once, with the last of them."""
        narrow = self._total if is_last else None
        self._filled.add(self._wide() if narrow is None else narrow, region(None, cols), home)

    def total(self) -> Tensor:
        """The sum so far, float32 or wider unless it is a single tile's."""
        total = self._wide() if self._total is None else self._total
        self._filled.finish(total)
        return total

    def result(self) -> Tensor:
        """The sum in the tensor's dtype, token-major."""
        return in_order(self.total(), TOKEN_MAJOR, self._like.dtype)

    def _wide(self) -> Tensor:
        """Where to add."""
        wide = torch.promote_types(self._like.dtype, torch.float32)
        if self._total is None:
            self._total = empty(self._like, self._like.shape, TOKEN_MAJOR, wide)
        self._total = self._total.to(wide)
        return self._total


class GradientShare:
    """A step's share of the gradient of a shard that is passing, until the sum arrives.

    The tiles' gradients are kept as they are, unless they outgrow the shard `(B, N, C, H)`.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._grads: list[tuple[Region, Tensor]] = []

    def add(self, at: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, C)`."""
        self._grads.append((at, grad))
        if sum(x.numel() for _, x in self._grads) > self._like.numel():
            total = GradientSum(self._like)
            for kept in self._grads:
                total.add(*kept)
            self._grads = [(WHOLE, total.total())]

    def add_to(self, total: Tensor, first: bool) -> None:
        """Add to the sum, or begin it: then `total` holds nothing yet."""
        filled = Filled(total.shape, is_full=not first)
        for at, grad in self._grads:
            filled.add(total, at, grad)
        filled.finish(total)
