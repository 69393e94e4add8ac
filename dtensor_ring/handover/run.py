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


def num_bytes(message: Incoming | Outgoing) -> int:
    """Return the bytes of a message."""
    return sum(x.num_bytes for x in message.contents)


class Incoming(NamedTuple):
    """A message of a peer: `put` takes its tensors once it has arrived."""

    peer: int
    contents: Sequence[Content]
    put: Callable[[list[Tensor]], object]


class Outgoing(NamedTuple):
    """A message to a peer: `fill` writes its tensors when it is posted."""

    peer: int
    contents: Sequence[Content]
    fill: Callable[[list[Tensor]], object]


class _Posted(NamedTuple):
    label: Label
    works: Sequence[Work]
    buffers: list[Tensor]
    arriving: list[tuple[Incoming, Tensor]]


class Posts:
    """The messages of one hand-over on this rank.

    Two ranks match their messages in the order in which they are posted. What a rank posts for a
    layer is one batch: NCCL would wait for what comes before a send of the same rank otherwise.

    Args:
        transport: moves them.
        rank: this rank, which labels its messages in profiles.
        device: where their tensors are.

    Attributes:
        num_sent: the bytes that were sent.
        device: where their tensors are.
    """

    def __init__(self, transport: Transport, rank: int, device: torch.device) -> None:
        self._transport, self._rank, self.device = transport, rank, device
        self._posted: list[_Posted] = []
        self.num_sent = 0
        transport.prepare(device)

    def post(self, layer: int, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing]) -> None:
        """Post messages of a layer; those without bytes are left out on both sides."""
        # Both sides know the sizes, so they leave out the same messages.
        incoming = [x for x in incoming if num_bytes(x)]
        outgoing = [x for x in outgoing if num_bytes(x)]
        if not incoming and not outgoing:
            return
        label = Label(RING, layer, self._rank)
        buffers, messages = list[Tensor](), list[P2P]()
        for x in (*incoming, *outgoing):
            # A transport may return a longer buffer, and wants back the one that it gave.
            buffers.append(self._transport.allocate(num_bytes(x), self.device))
            messages.append(P2P(buffers[-1][: num_bytes(x)], x.peer, source=x.peer))
        receives, sends = messages[: len(incoming)], messages[len(incoming) :]
        with label("pack"):
            for x, message in zip(outgoing, sends, strict=True):
                x.fill(views_of(message.flat, x.contents))
        with label("send" if outgoing else "receive"):
            works = self._transport.start(receives, sends)
        self._transport.at(label)
        self.num_sent += sum(map(num_bytes, outgoing))
        arriving = [(x, y.flat) for x, y in zip(incoming, receives, strict=True)]
        self._posted.append(_Posted(label, works, buffers, arriving))

    def tell(self, peers: Sequence[int], x: Tensor) -> None:
        """Send a tensor to peers, which hear it."""
        content = [Content.of(x)]
        self.post(0, [], [Outgoing(peer, content, lambda to: to[0].copy_(x)) for peer in peers])

    def hear(self, peer: int, into: Tensor) -> None:
        """Expect a tensor of this shape and dtype, which a peer tells; `finish` writes it."""
        self.post(0, [Incoming(peer, [Content.of(into)], lambda x: into.copy_(x[0]))], [])

    def finish(self) -> None:
        """Wait for all messages, in the order in which they were posted."""
        posted, self._posted = self._posted, []
        for label, works, buffers, arriving in posted:
            with label("wait"):
                for work in works:
                    work.wait()
            with label("unpack"):
                for x, flat in arriving:
                    x.put(views_of(flat, x.contents))
            for buffer in buffers:
                self._transport.free(buffer)

    def abandon(self) -> None:
        """Hold the memory of messages in flight until they end, after an error."""
        works = [work for x in self._posted for work in x.works]
        hold_until_complete(works, [buffer for x in self._posted for buffer in x.buffers])
        self._posted = []


class MovedPart(NamedTuple):
    """Columns of some heads of a tensor `(B, n, C, H)`."""

    tensor: Tensor
    cols: Cols

    @property
    def content(self) -> Content:
        """Return the shape and the dtype of these columns in a message."""
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
