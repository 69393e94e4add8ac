"""Where the messages of an exchange lie: in tensors, or in a buffer.

Note [Copies]: a part of a tensor is copied into its message, or out of it. It needs no copy where
it travels in pieces and each of them is one piece of memory: then it is sent from there, or
received there. So hardly anything that comes is copied on the way from tokens to heads, nor what
leaves on the way back.

Where all of it lies is known from shapes and strides. It is planned once, as on 8 ranks one call
has dozens of messages.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from torch import Tensor

from dtensor_ring.compute.memory import TOKEN_MAJOR, strides
from dtensor_ring.planning.exchanges.exchange import TokenSplit
from dtensor_ring.planning.routes.columns import Cols
from dtensor_ring.planning.values.span import Span, length

ALIGNED = 16
"""Bytes that messages and tensors within them begin at a multiple of: any dtype can be there."""

LARGE_PIECE = 1 << 18
"""Bytes of the pieces of a message, on average, from which each of them travels alone.

Another message is another thread to wake: below, that takes longer than to copy all into one.
"""


def aligned(num_bytes: int) -> int:
    """The bytes that a message takes in memory, rounded up to `ALIGNED`."""
    return -(-num_bytes // ALIGNED) * ALIGNED


def goes_in_pieces(num_bytes: int, num_pieces: int) -> bool:
    """Whether a peer gets one message for each piece, instead of one message for all.

    Both ranks ask this, so it knows of nothing that only one of them has.
    """
    return 0 < num_pieces * LARGE_PIECE <= num_bytes


class TensorPart(NamedTuple):
    """Tokens of some heads of one of the tensors."""

    number: int
    cols: Cols
    heads: Span

    def heads_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """All tokens of these heads, `(B, n, L, H)`."""
        x, (begin, end) = tensors[self.number], self.heads
        return x if end - begin == x.shape[1] else x.narrow(1, begin, end - begin)


class Split(NamedTuple):
    """What two ranks exchange: the tokens, and the heads of each tensor."""

    tokens: TokenSplit
    heads: tuple[Span, ...]

    @property
    def parts(self) -> Iterator[TensorPart]:
        """A part of each tensor."""
        for number, heads in enumerate(self.heads):
            yield TensorPart(number, self.tokens.cols, heads)


class Geometry(NamedTuple):
    """Shape and strides of a tensor `(B, N, L, H)`, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, x: Tensor) -> Geometry:
        """That of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.itemsize)

    @classmethod
    def token_major(cls, shape: tuple[int, ...], itemsize: int) -> Geometry:
        """That of a dense tensor, token by token."""
        return cls(shape, strides(shape, TOKEN_MAJOR), itemsize)

    def part(self, part: TensorPart) -> Geometry:
        """That of a copy of a part, side by side."""
        shape = self.shape[0], length(part.heads), len(part.cols), self.shape[3]
        return Geometry.token_major(shape, self.itemsize)

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return prod(self.shape) * self.itemsize

    def pieces(self, heads: Span, spans: Sequence[Span]) -> list[Span] | None:
        """Where spans of tokens of some heads are, row by row.

        `None` if one of them is not one piece of memory, token by token.
        """
        of_row, of_head, of_token, of_number = self.strides
        num_heads, head_dim = length(heads), self.shape[3]
        dense = (head_dim, of_number, 1), (num_heads, of_head, head_dim)
        longest = max(map(length, spans), default=0)
        dense += ((longest, of_token, num_heads * head_dim),)
        if any(size > 1 and found != expected for size, found, expected in dense):
            return None
        begins = [
            (row * of_row + heads[0] * of_head + first * of_token, end - first)
            for row in range(self.shape[0])
            for first, end in spans
        ]
        return [(begin, begin + tokens * num_heads * head_dim) for begin, tokens in begins]


class Copy(NamedTuple):
    """A part of a tensor, side by side in a buffer."""

    part: TensorPart
    geometry: Geometry
    begin: int
    """In the buffer, in bytes."""

    def pieces(self, spans: Sequence[Span]) -> list[Span]:
        """Where these pieces of all its tokens are in the buffer, in bytes."""
        packed = pairwise(accumulate(map(length, spans), initial=0))
        found = self.geometry.pieces((0, self.geometry.shape[1]), list(packed))
        assert found is not None, "a copy is dense"
        size = self.geometry.itemsize
        return [(self.begin + first * size, self.begin + end * size) for first, end in found]


class Message(NamedTuple):
    """A piece of memory that goes to a peer, or comes from it."""

    peer: int
    number: int | None
    """Of the tensor that it lies in, `None` if that is the buffer."""
    at: Span
    """In the memory of the tensor, in elements; in the buffer, in bytes."""


class Mail(NamedTuple):
    """The messages of one side of an exchange; those that do not lie in tensors are in a buffer."""

    num_bytes: int
    """Of the buffer."""
    copies: tuple[Copy, ...]
    messages: tuple[Message, ...]
    copy_of: dict[tuple[int, int], int]
    """By peer and number of the tensor, the index of its copy."""


def mail_of(
    splits: Sequence[Split],
    geometries: Sequence[Geometry],
    is_sent: bool,
    copied: Container[tuple[int, int]] = (),
) -> Mail:
    """Where the messages of one side are.

    Args:
        splits: what each peer has.
        geometries: of the tensors that it is a part of.
        is_sent: whether it leaves: then peers that get the same share copies.
        copied: peer and number of tensors that have no place to lie in.
    """
    sorting = _Sorting(geometries)
    for split in splits:
        peer = split.tokens.peer
        content = (split.tokens.cols, split.heads) if is_sent else peer
        is_copied = [(peer, number) in copied for number in range(len(geometries))]
        sorting.add(split, content, is_copied)
    copies, messages = tuple(sorting.copies), tuple(sorting.messages)
    return Mail(sorting.num_bytes, copies, messages, sorting.copy_of)


class _Sorting:
    """Puts messages where they lie, or their copies side by side."""

    def __init__(self, geometries: Sequence[Geometry]) -> None:
        self._lies = geometries
        self._known: dict[Hashable, dict[int, int]] = {}
        self.num_bytes = 0
        self.copies: list[Copy] = []
        self.copy_of: dict[tuple[int, int], int] = {}
        self.messages: list[Message] = []

    def add(self, split: Split, content: Hashable, is_copied: Sequence[bool]) -> None:
        """Add the messages of a peer; equal contents have the same copies."""
        peer, spans, parts = split.tokens.peer, split.tokens.pieces, self._parts(split)
        num_rows = sum(geometry.shape[0] for geometry in self._lies)
        in_pieces = goes_in_pieces(_num_bytes(parts), num_rows * len(spans))
        lying = {
            part.number: pieces
            for part, _ in parts
            if in_pieces and not is_copied[part.number]
            and (pieces := self._lies[part.number].pieces(part.heads, spans)) is not None
        }  # fmt: skip
        index = self._copied(peer, [x for x in parts if x[0].number not in lying], content)
        if not in_pieces:
            self._post_copies(peer, index, parts)
            return
        for number in range(len(parts)):
            if number in lying:
                self._post(peer, number, lying[number])
            else:
                self._post(peer, None, self.copies[index[number]].pieces(spans))

    def _parts(self, split: Split) -> list[_Part]:
        return [(part, self._lies[part.number].part(part)) for part in split.parts]

    def _copied(self, peer: int, parts: list[_Part], content: Hashable) -> dict[int, int]:
        """The indices of the copies of parts, by number of the tensor."""
        if content not in self._known:
            self._known[content] = self._place(parts)
        index = self._known[content]
        self.copy_of |= {(peer, number): found for number, found in index.items()}
        return index

    def _place(self, parts: list[_Part]) -> dict[int, int]:
        """Place copies side by side in the buffer."""
        index, end = {}, self.num_bytes
        # Wide dtypes first: then each begins where it may without gaps.
        for part, geometry in sorted(parts, key=lambda x: -x[1].itemsize):
            index[part.number] = len(self.copies)
            self.copies.append(Copy(part, geometry, end))
            end += geometry.num_bytes
        self.num_bytes = aligned(end)
        return index

    def _post_copies(self, peer: int, index: dict[int, int], parts: list[_Part]) -> None:
        """All copies as one message."""
        begin = min((self.copies[i].begin for i in index.values()), default=0)
        self._post(peer, None, [(begin, begin + _num_bytes(parts))])

    def _post(self, peer: int, number: int | None, spans: Sequence[Span]) -> None:
        """Nothing empty travels."""
        self.messages += [Message(peer, number, at) for at in spans if length(at)]


_Part = tuple[TensorPart, Geometry]


def _num_bytes(parts: Sequence[_Part]) -> int:
    return sum(geometry.num_bytes for _, geometry in parts)
