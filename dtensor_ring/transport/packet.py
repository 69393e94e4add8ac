"""The content of messages: columns of a key and value pair, or of their gradients' sums."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.memory import TOKEN_MAJOR, part_of, region, strides
from dtensor_ring.compute.ranges import pack
from dtensor_ring.planning.routes.columns import Cols

LARGE = 1 << 23
"""Bytes of a packet from which its owner sends key and value apart, each from where it lies.

Another message is another thread to wake, on a core that computes: below, that takes longer than to
copy both into one message.
"""


def goes_apart(num_bytes: int) -> bool:
    """Whether the owner sends keys and values of this size as two messages.

    Both ranks of a message ask this, so it knows of nothing that only one of them has.
    """
    return num_bytes >= LARGE


class Packet:
    """Columns of two tensors `(B, N, C, H)`, each dense and token-major in memory.

    Args:
        cols: the columns, counted in the whole shard.
        pair: the columns of both tensors.
        buffer: uint8, that has both side by side; `None` if they are the tensors of a user.
    """

    def __init__(self, cols: Cols, pair: Pair, buffer: Tensor | None = None) -> None:
        self.cols, self.pair, self.buffer = cols, pair, buffer

    @classmethod
    def within(cls, buffer: Tensor, like: Pair, cols: Cols, dtype: torch.dtype) -> Packet:
        """A packet of any content.

        Args:
            buffer: uint8, at least as large as the columns.
            like: the whole pair, whose batch, heads and head dims the columns have.
            cols: the columns, counted in the whole shard.
            dtype: in which they travel.
        """
        flat = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        tensors, offset = [], 0
        for x in like:
            batch, heads, _, head_dim = x.shape
            shape = batch, heads, len(cols), head_dim
            numel = prod(shape)
            # Dense, so that a kernel reads the message as it arrived.
            part = flat[offset : offset + numel]
            tensors.append(part.as_strided(shape, strides(shape, TOKEN_MAJOR)))
            offset += numel
        return cls(cols, (tensors[0], tensors[1]), buffer)

    @classmethod
    def lying(cls, pair: Pair, cols: Cols) -> Packet | None:
        """These columns where a pair has them, if each tensor has them in one piece of memory."""
        if len(cols.spans) != 1:
            return None
        at = region(None, cols.spans[0])
        packet = cls(cols, (part_of(pair[0], at), part_of(pair[1], at)))
        is_dense = all(x.permute(TOKEN_MAJOR).is_contiguous() for x in packet.pair)
        return packet if is_dense else None

    @property
    def num_bytes(self) -> int:
        """Of both tensors."""
        key, value = self.pair
        return key.nbytes + value.nbytes

    def fill(self, pair: Pair, at: Cols) -> None:
        """Copy columns out of a pair: as many as the packet has, from where the pair has them."""
        for view, x in zip(self.pair, pair, strict=True):
            pack(view, x, at)

    def messages(self, is_apart: bool) -> list[Tensor]:
        """Flat tensors: key and value, or both in one, which takes a buffer."""
        if is_apart:
            return [x.permute(TOKEN_MAJOR).view(-1) for x in self.pair]
        assert self.buffer is not None, "what lies somewhere else is not one message"
        # A reused buffer may be larger; only this part travels.
        return [self.buffer[: self.num_bytes].view(self.pair[0].dtype)]
