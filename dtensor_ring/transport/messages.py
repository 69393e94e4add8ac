"""The messages of an exchange on one rank: one for each peer, all of a side packed in one buffer.

Where each part of a message is in the buffer is planned once: on 8 ranks one call has dozens of
them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from dtensor_ring.compute.memory import TOKEN_MAJOR, strides
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.ranges import Span, length
from dtensor_ring.transport.transport import P2P

ALIGNED = 16
"""Messages begin at a multiple of so many bytes: any dtype can be there."""


def aligned(num_bytes: int) -> int:
    """The bytes that a message takes in the buffer, rounded up to `ALIGNED`."""
    return -(-num_bytes // ALIGNED) * ALIGNED


class TensorShape(NamedTuple):
    """What a token of a head takes in one of the tensors `(B, N, L, H)`."""

    batch: int
    head_dim: int
    itemsize: int

    @classmethod
    def of(cls, x: Tensor) -> TensorShape:
        """The shape of a tensor."""
        return cls(x.shape[0], x.shape[3], x.itemsize)


class TensorPart(NamedTuple):
    """Tokens of some heads of one of the tensors."""

    number: int
    """The index of the tensor."""
    cols: Cols
    heads: Span

    def heads_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """All tokens of these heads, `(B, n, L, H)`."""
        x, (begin, end) = tensors[self.number], self.heads
        return x if end - begin == x.shape[1] else x.narrow(1, begin, end - begin)


class Split(NamedTuple):
    """What goes to a peer, or comes from it: a part of each tensor."""

    peer: int
    parts: tuple[TensorPart, ...]


class Copy(NamedTuple):
    """A part of a tensor in the buffer, dense and token-major."""

    peer: int
    """The first peer that gets it, or the one that it comes from."""
    part: TensorPart
    shape: tuple[int, int, int, int]
    span: Span
    """Its bytes in the buffer."""


class Mail(NamedTuple):
    """The messages of one side of an exchange, packed in one buffer."""

    num_bytes: int
    """The size of the buffer."""
    copies: tuple[Copy, ...]
    messages: tuple[tuple[int, Span], ...]
    """Each peer, and the bytes of its message in the buffer; empty messages are left out."""

    def started(self, buffer: Tensor) -> list[P2P]:
        """The messages in the buffer, as a transport starts them."""
        return [P2P(buffer[slice(*span)], peer, source=peer) for peer, span in self.messages]

    def views(self, buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The copies in the buffer, `(B, n, C, H)`, with the dtypes of their tensors."""
        dtypes = {x.dtype for x in tensors}
        # One view for each dtype: a view costs the host as much as a small copy.
        typed = {dtype: buffer[: self.num_bytes].view(dtype) for dtype in dtypes}
        views = []
        for _, part, shape, (begin, _) in self.copies:
            flat = typed[tensors[part.number].dtype]
            offset = flat.storage_offset() + begin // flat.itemsize
            views.append(flat.as_strided(shape, strides(shape, TOKEN_MAJOR), offset))
        return views


def mail_of(splits: Sequence[Split], shapes: Sequence[TensorShape], is_sent: bool) -> Mail:
    """Pack the messages of one side, one after the other.

    Args:
        splits: what each peer gets, or sends.
        shapes: of the tensors.
        is_sent: whether the messages leave; then peers that get the same parts share one copy.
    """
    copies, messages, known, end = list[Copy](), list[tuple[int, Span]](), dict[Hashable, Span](), 0
    for split in splits:
        content: Hashable = split.parts if is_sent else split.peer
        if content not in known:
            packed = _packed(split, shapes, end)
            copies += packed
            known[content] = end, packed[-1].span[1]
            end = aligned(packed[-1].span[1])
        if length(known[content]):
            messages.append((split.peer, known[content]))
    return Mail(end, tuple(copies), tuple(messages))


def _packed(split: Split, shapes: Sequence[TensorShape], begin: int) -> list[Copy]:
    """The copies of one message, which begins there in the buffer."""
    copies = []
    # Wide dtypes first: then each begins where it may without gaps.
    for part in sorted(split.parts, key=lambda part: -shapes[part.number].itemsize):
        batch, head_dim, itemsize = shapes[part.number]
        shape = batch, length(part.heads), len(part.cols), head_dim
        end = begin + prod(shape) * itemsize
        copies.append(Copy(split.peer, part, shape, (begin, end)))
        begin = end
    return copies
