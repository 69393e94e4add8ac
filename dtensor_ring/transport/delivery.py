"""The two sides of an exchange on one rank: what leaves, and what comes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_ring.compute.ranges import pack
from dtensor_ring.transport.messages import ALIGNED, Copy, Mail, Message
from dtensor_ring.transport.protocol import P2P, Transport


class Side:
    """The messages of one side of an exchange.

    Args:
        mail: where they are.
        tensors: of which they are parts.
        transport: of the call.
    """

    def __init__(self, mail: Mail, tensors: Sequence[Tensor], transport: Transport) -> None:
        self._mail, self._tensors, self._transport = mail, tensors, transport
        self._buffer: Tensor | None = None
        if mail.copies:  # of an empty batch, they are empty
            self._buffer = transport.allocate(mail.num_bytes, tensors[0].device)

    def pack(self) -> None:
        """Copy into the buffer what is not sent from where it lies."""
        for packed, copy in zip(self.copies, self._mail.copies, strict=True):
            pack(packed, copy.part.heads_of(self._tensors), copy.part.cols)

    def messages(self) -> list[P2P]:
        """The messages to start."""
        return [
            P2P(_flat(x, self._buffer, self._tensors), x.peer, source=x.peer)
            for x in self._mail.messages
        ]

    @property
    def copies(self) -> list[Tensor]:
        """`(B, n, C, H)`, as `Mail.copies` has them."""
        return _views(self._mail.copies, self._buffer, self._tensors)

    def free(self) -> None:
        """Give the buffer back, once nobody reads or writes it."""
        if self._buffer is not None:
            self._transport.free(self._buffer)


def _views(
    copies: Sequence[Copy], buffer: Tensor | None, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The copies `(B, n, C, H)` in the buffer."""
    if buffer is None:
        return []
    dense = buffer[: buffer.numel() // ALIGNED * ALIGNED]
    typed: dict[torch.dtype, Tensor] = {}
    views = []
    for (number, _, _), geometry, begin in copies:
        dtype = tensors[number].dtype
        if dtype not in typed:  # a view costs the host as much as a small copy
            typed[dtype] = dense.view(dtype)
        offset = typed[dtype].storage_offset() + begin // geometry.itemsize
        views.append(typed[dtype].as_strided(geometry.shape, geometry.strides, offset))
    return views


def _flat(message: Message, buffer: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of a message, in the buffer or in the tensor that it lies in."""
    begin, end = message.at
    if message.number is None:
        assert buffer is not None
        return buffer[begin:end]
    x = tensors[message.number]
    return x.as_strided((end - begin,), (1,), x.storage_offset() + begin).view(torch.uint8)
