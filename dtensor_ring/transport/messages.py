"""The messages of an all-to-all on one rank: one per peer, packed in one buffer per side.

The offset of each part is planned once, because a call on 8 ranks has dozens of parts.
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

# Messages begin at a multiple of this many bytes, so a view of any dtype can begin there.
ALIGNED = 16


def aligned(num_bytes: int) -> int:
    """Round the bytes of a message up to a multiple of `ALIGNED`."""
    return -(-num_bytes // ALIGNED) * ALIGNED


class TensorShape(NamedTuple):
    """The facts of a tensor `(B, N, L, H)` that decide the bytes of one token of one head."""

    batch: int
    head_dim: int
    itemsize: int

    @classmethod
    def of(cls, x: Tensor) -> TensorShape:
        """Return the facts of a tensor."""
        return cls(x.shape[0], x.shape[3], x.itemsize)


class TensorPart(NamedTuple):
    """Tokens of some heads of one tensor.

    Attributes:
        number: the index of the tensor.
        cols: the tokens.
        heads: the span of heads.
    """

    number: int
    cols: Cols
    heads: Span

    def heads_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return all tokens of these heads, `(B, n, L, H)`."""
        x, (begin, end) = tensors[self.number], self.heads
        return x if end - begin == x.shape[1] else x.narrow(1, begin, end - begin)


class Split(NamedTuple):
    """A part of each tensor that goes to a peer, or comes from it."""

    peer: int
    parts: tuple[TensorPart, ...]


class Copy(NamedTuple):
    """A part of a tensor in the buffer, dense and token-major.

    Attributes:
        peer: the first peer that gets it, or the peer that sends it.
        part: the part of the tensor.
        shape: `(B, n, C, H)`.
        span: its bytes in the buffer.
    """

    peer: int
    part: TensorPart
    shape: tuple[int, int, int, int]
    span: Span


class Mail(NamedTuple):
    """The messages of one side of an all-to-all, packed in one buffer.

    Attributes:
        num_bytes: the size of the buffer.
        copies: the parts in the buffer.
        messages: each peer, and the bytes of its message in the buffer, without empty messages.
    """

    num_bytes: int
    copies: tuple[Copy, ...]
    messages: tuple[tuple[int, Span], ...]

    def started(self, buffer: Tensor) -> list[P2P]:
        """Return the messages in the buffer, for `Transport.start`."""
        return [P2P(buffer[slice(*span)], peer, source=peer) for peer, span in self.messages]

    def views(self, buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the copies in the buffer, `(B, n, C, H)`, with the dtypes of their tensors."""
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
    """Plan the buffer of one side: its messages follow each other.

    Args:
        splits: the parts that each peer gets, or sends.
        shapes: the shapes of the tensors.
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
    """Return the copies of the message that begins at byte `begin` of the buffer."""
    copies = []
    # Wide dtypes come first, so each part is aligned for its dtype without gaps.
    for part in sorted(split.parts, key=lambda part: -shapes[part.number].itemsize):
        batch, head_dim, itemsize = shapes[part.number]
        shape = batch, length(part.heads), len(part.cols), head_dim
        end = begin + prod(shape) * itemsize
        copies.append(Copy(split.peer, part, shape, (begin, end)))
        begin = end
    return copies
