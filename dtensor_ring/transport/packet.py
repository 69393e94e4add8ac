"""The content of a message: columns of a key and value pair, or of their gradients' sums."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.memory import Order, strides
from dtensor_ring.compute.ranges import pack
from dtensor_ring.planning.routes.columns import Cols


class Packet:
    """Columns of two tensors `(B, N, C, H)` side by side in a buffer.

    Args:
        buffer: uint8, at least as large as the columns.
        like: the whole pair, whose batch, heads and head dims the columns have.
        cols: the columns, counted in the whole shard.
        dtype: in which they travel.
        order: the order of the dimensions in memory.
    """

    def __init__(
        self, buffer: Tensor, like: Pair, cols: Cols, dtype: torch.dtype, order: Order
    ) -> None:
        # Both tensors in one buffer, so that a hop is one message in each direction.
        flat = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        tensors, offset = [], 0
        for x in like:
            batch, heads, _, head_dim = x.shape
            shape = batch, heads, len(cols), head_dim
            numel = prod(shape)
            # Dense in the given order: a kernel reads the message as it arrived.
            tensors.append(flat[offset : offset + numel].as_strided(shape, strides(shape, order)))
            offset += numel
        self.buffer, self.cols = buffer, cols
        # A reused buffer may be larger; only this part travels.
        self.flat = flat[:offset]
        self.pair = (tensors[0], tensors[1])

    def fill(self, pair: Pair, at: Cols) -> None:
        """Copy columns out of a pair: as many as the packet has, from where the pair has them."""
        for view, x in zip(self.pair, pair, strict=True):
            pack(view, x, at)
