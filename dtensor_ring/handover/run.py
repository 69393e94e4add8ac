"""The messages of a hand-over on one rank: posted one by one, and all awaited at the end.

Between a post and the end a rank may do anything else, so messages travel beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.memory import TOKEN_MAJOR, columns, empty, pack, unpack
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.transport.transport import P2P, Transport, Work, hold_until_complete

RING = "hand over"  # in profiles


class Content(NamedTuple):
    """The shape and dtype of a tensor in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Content:
        """Return those of a tensor."""
        return cls(tuple(x.shape), x.dtype)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it takes in a message."""
        return prod(self.shape) * self.dtype.itemsize


def views_of(buffer: Tensor, contents: Sequence[Content]) -> list[Tensor]:
    """Return the tensors of a message in its buffer of bytes, in the order of `contents`."""
    found, begin = dict[int, Tensor](), 0
    # Wide dtypes come first, so each tensor is aligned for its dtype without gaps.
    for number in sorted(range(len(contents)), key=lambda i: -contents[i].dtype.itemsize):
        content = contents[number]
        end = begin + content.num_bytes
        found[number] = buffer[begin:end].view(content.dtype).view(content.shape)
        begin = end
    return [found[number] for number in range(len(contents))]


class _Posted(NamedTuple):
    label: Label
    works: Sequence[Work]
    buffer: Tensor
    arrived: Callable[[], None] | None


class Posts:
    """The messages of one hand-over on this rank.

    Args:
        transport: moves them.
        device: where their tensors are.

    Attributes:
        num_sent: the bytes that were sent.
        device: where their tensors are.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport, self.device = transport, device
        self._posted: list[_Posted] = []
        self.num_sent = 0
        transport.prepare(device)

    def receive(
        self,
        peer: int,
        layer: int,
        contents: Sequence[Content],
        put: Callable[[list[Tensor]], object],
    ) -> None:
        """Expect a message of a peer. `put` takes its tensors, once it has arrived."""
        buffer, flat = self._buffer(contents)
        if not flat.numel():
            return
        works = self._start(Label(RING, layer, peer), [P2P(flat, peer, source=peer)], [])

        def arrived() -> None:
            put(views_of(flat, contents))

        self._posted.append(_Posted(Label(RING, layer, peer), works, buffer, arrived))

    def send(
        self,
        peer: int,
        layer: int,
        contents: Sequence[Content],
        fill: Callable[[list[Tensor]], object],
    ) -> None:
        """Send a message to a peer, whose tensors `fill` writes now."""
        buffer, flat = self._buffer(contents)
        if not flat.numel():
            return
        label = Label(RING, layer, peer)
        with label("pack"):
            fill(views_of(flat, contents))
        with label("send"):
            works = self._start(label, [], [P2P(flat, peer, source=peer)])
        self.num_sent += flat.numel()
        self._posted.append(_Posted(label, works, buffer, None))

    def tell(self, peer: int, x: Tensor) -> None:
        """Send a tensor to a peer, which hears it."""
        self.send(peer, 0, [Content.of(x)], lambda packed: packed[0].copy_(x))

    def hear(self, peer: int, into: Tensor) -> None:
        """Expect a tensor of this shape and dtype, which a peer tells; `finish` writes it."""
        self.receive(peer, 0, [Content.of(into)], lambda packed: into.copy_(packed[0]))

    def finish(self) -> None:
        """Wait for all messages, in the order in which they were posted."""
        posted, self._posted = self._posted, []
        for label, works, buffer, arrived in posted:
            with label("wait"):
                for work in works:
                    work.wait()
            if arrived is not None:
                with label("unpack"):
                    arrived()
            self._transport.free(buffer)

    def abandon(self) -> None:
        """Hold the memory of messages in flight until they end, after an error."""
        works = [work for x in self._posted for work in x.works]
        hold_until_complete(works, [x.buffer for x in self._posted])
        self._posted = []

    def _start(self, label: Label, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        works = self._transport.start(receives, sends)
        self._transport.at(label)
        return works

    def _buffer(self, contents: Sequence[Content]) -> tuple[Tensor, Tensor]:
        """Return memory for a message, and the part of it that travels."""
        num_bytes = sum(x.num_bytes for x in contents)
        if not num_bytes:
            none = torch.empty(0, dtype=torch.uint8, device=self.device)
            return none, none
        buffer = self._transport.allocate(num_bytes, self.device)
        return buffer, buffer[:num_bytes]


class MovedPart(NamedTuple):
    """Columns of some heads of a tensor `(B, n, C, H)`."""

    tensor: Tensor
    cols: Cols

    @property
    def content(self) -> Content:
        """Return what they are in a message."""
        shape = (*self.tensor.shape[:2], len(self.cols), self.tensor.shape[3])
        return Content(shape, self.tensor.dtype)


def fill(parts: Sequence[MovedPart], packed: Sequence[Tensor]) -> None:
    """Copy parts of tensors into those of a message."""
    for part, into in zip(parts, packed, strict=True):
        pack(into, part.tensor, part.cols)


def put(parts: Sequence[MovedPart], packed: Sequence[Tensor]) -> None:
    """Copy the tensors of a message to parts of tensors."""
    for part, x in zip(parts, packed, strict=True):
        unpack(part.tensor, x, part.cols)


def copy(parts: Sequence[MovedPart], targets: Sequence[MovedPart]) -> None:
    """Copy parts of tensors to parts of other tensors on the same rank."""
    for part, target in zip(parts, targets, strict=True):
        x, cols = part
        if len(cols.spans) == 1:
            packed = columns(x, cols.spans[0])
        else:
            packed = empty(x, part.content.shape, TOKEN_MAJOR)
            pack(packed, x, cols)
        unpack(target.tensor, packed, target.cols)
