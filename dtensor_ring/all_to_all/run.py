"""Packs what each peer gets, sends one message to each, and unpacks.

It moves tensors from sharded tokens to sharded heads and back, or from one layout to another.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.all_to_all.plan import AllToAllPlan
from dtensor_ring.compute.memory import TOKEN_MAJOR, columns, empty, pack, strides, unpack
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.ranges import Span, length
from dtensor_ring.transport.transport import P2P, Transport, hold_until_complete

# Messages begin at a multiple of this many bytes, so a view of any dtype can begin there.
ALIGNED = 16


def aligned(num_bytes: int) -> int:
    """Round the bytes of a message up to a multiple of `ALIGNED`."""
    return -(-num_bytes // ALIGNED) * ALIGNED


class TensorShape(NamedTuple):
    """The facts of a tensor `(B, N, rows, H)` that decide the bytes of one row of one head.

    Attributes:
        batch: rows of the batch.
        head_dim: the last dimension.
        itemsize: bytes of a number.
        block_size: tokens of a row, 1 but for scales by block: see `arrived_rows`.
    """

    batch: int
    head_dim: int
    itemsize: int
    block_size: int = 1

    @classmethod
    def of(cls, x: Tensor, block_size: int = 1) -> TensorShape:
        """Return the facts of a tensor."""
        return cls(x.shape[0], x.shape[3], x.itemsize, block_size)


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


class PackedMessages(NamedTuple):
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
        return [P2P(buffer[first:end], peer, source=peer) for peer, (first, end) in self.messages]

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


# The offset of each part is planned once, because a call on 8 ranks has dozens of parts.
def packed_messages(
    splits: Sequence[Split], shapes: Sequence[TensorShape], is_sent: bool
) -> PackedMessages:
    """Plan the buffer of one side: its messages follow each other.

    Args:
        splits: the parts that each peer gets, or sends.
        shapes: the shapes of the tensors.
        is_sent: whether the messages leave; then peers that get the same parts share one copy.
    """
    # The buffer, each message aligned for any dtype:
    #     | peer 1: wide parts, narrow parts | padding | peer 2: wide parts, narrow parts |
    copies, messages, known, end = list[Copy](), list[tuple[int, Span]](), dict[Hashable, Span](), 0
    for split in splits:
        # Peers that get the same rows of the same heads share one packed message.
        content: Hashable = split.parts if is_sent else split.peer
        if content not in known:
            packed = _packed(split, shapes, end)
            copies += packed
            known[content] = end, packed[-1].span[1]
            # Each message begins where views of any dtype are aligned.
            end = aligned(packed[-1].span[1])
        if length(known[content]):
            messages.append((split.peer, known[content]))
    return PackedMessages(end, tuple(copies), tuple(messages))


def _packed(split: Split, shapes: Sequence[TensorShape], begin: int) -> list[Copy]:
    """Return the copies of the message that begins at byte `begin` of the buffer."""
    copies = []
    # Wide dtypes come first, so each part is aligned for its dtype without gaps.
    for part in sorted(split.parts, key=lambda part: -shapes[part.number].itemsize):
        batch, head_dim, itemsize, _ = shapes[part.number]
        shape = batch, length(part.heads), len(part.cols), head_dim
        end = begin + prod(shape) * itemsize
        copies.append(Copy(split.peer, part, shape, (begin, end)))
        begin = end
    return copies


class ResultPart(NamedTuple):
    """A part of a result, which is the sum of its sources.

    Attributes:
        part: where the sum goes.
        sources: in the order of the ranks, each an index into the received copies, or the part of
            an input that stays on this rank.
    """

    part: TensorPart
    sources: tuple[int | TensorPart, ...]


class AllToAllMessages(NamedTuple):
    """The plan of an all-to-all on one rank.

    Attributes:
        sends: the messages to other ranks.
        receives: the messages from other ranks.
        local_parts: parts of the results that need no data from other ranks.
        received_parts: parts of the results that are unpacked after the receive.
        shapes: the shapes `(B, n, T, H)` of the results.
    """

    sends: PackedMessages
    receives: PackedMessages
    local_parts: tuple[ResultPart, ...]
    received_parts: tuple[ResultPart, ...]
    shapes: tuple[tuple[int, int, int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Estimate the host memory of this plan, in bytes."""
        sides_messages = self.sends, self.receives
        return 1000 + 600 * sum(len(x.copies) + len(x.messages) for x in sides_messages)


@cached_bytes(2**24, lambda found: found.num_bytes)
def messages_of(
    plan: AllToAllPlan,
    num_heads: tuple[int, ...],
    num_key_heads: int,
    shapes: tuple[TensorShape, ...],
    is_back: bool = False,
) -> AllToAllMessages:
    """Plan the all-to-all of tensors; a cache of 16 MiB keeps the plans.

    Args:
        plan: the plan for tokens.
        num_heads: the number of heads of each tensor, on the side that has all heads.
        num_key_heads: the number of key heads, which decides how heads are sharded.
        shapes: the shapes of the tensors.
        is_back: whether the tensors return, from sharded heads to sharded tokens.

    Raises:
        ValueError: if the heads cannot be sharded over the ranks.
    """

    def heads(rank: int) -> tuple[Span, ...]:
        shard = plan.head_shard(rank, num_key_heads)
        return tuple(shard.span(count, num_key_heads) for count in num_heads)

    own = heads(plan.rank)
    # What arrives has the heads of this rank only, so they count from 0.
    here = tuple((0, length(span)) for span in own)
    arrived = [arrived_rows(plan, shape.block_size) for shape in shapes]
    sides = [
        [(x.peer, [x.cols.blocks(shape.block_size) for shape in shapes]) for x in plan.sends],
        [(x.peer, [rows[i] for rows, _ in arrived]) for i, x in enumerate(plan.receives)],
    ]
    directions = [
        [_split(peer, rows, heads(peer)) for peer, rows in sides[0]],
        [_split(peer, rows, here) for peer, rows in sides[1]],
    ]
    # On the way back, what came is what leaves.
    leaving, coming = reversed(directions) if is_back else directions
    num_rows = [plan.num_tokens[0]] * len(shapes) if is_back else [total for _, total in arrived]
    counts = num_heads if is_back else map(length, own)
    results = tuple(
        (shape.batch, count, rows, shape.head_dim)
        for shape, count, rows in zip(shapes, counts, num_rows, strict=True)
    )
    return _messages_of(plan.rank, leaving, coming, shapes, results)


def arrived_rows(plan: AllToAllPlan, block_size: int) -> tuple[list[Cols], int]:
    """Return the rows that each source sends, and their number, if a row has so many tokens.

    Tokens come in the order of their positions. Blocks of tokens are counted in the whole shard of
    their source, and those of one source follow those of the sources before it.
    """
    if block_size == 1:
        return [x.cols for x in plan.receives], plan.num_tokens[1]
    counts = [-(-len(x.cols) // block_size) for x in plan.receives]
    ends = list(accumulate(counts, initial=0))
    return [Cols((span,)) for span in pairwise(ends)], ends[-1]


def _split(peer: int, rows: Sequence[Cols], heads: Sequence[Span]) -> Split:
    """Return these rows and heads of each tensor."""
    pairs = zip(rows, heads, strict=True)
    parts = (TensorPart(i, cols, span) for i, (cols, span) in enumerate(pairs))
    return Split(peer, tuple(parts))


def _messages_of(
    rank: int,
    leaving: list[Split],
    coming: list[Split],
    shapes: tuple[TensorShape, ...],
    results: tuple[tuple[int, int, int, int], ...],
) -> AllToAllMessages:
    """Plan the messages, and the sources of each part of the results."""
    outgoing, incoming = ([x for x in side if x.peer != rank] for side in (leaving, coming))
    receives = packed_messages(incoming, shapes, is_sent=False)
    # A part comes from a message, by its index, or from an input of this rank.
    by_part: dict[tuple[int, int], int | TensorPart] = {
        (copy.peer, copy.part.number): index for index, copy in enumerate(receives.copies)
    }
    for split in leaving:
        if split.peer == rank:
            by_part |= {(rank, part.number): part for part in split.parts}
    sources = dict[TensorPart, list[int | TensorPart]]()
    for split in coming:  # on the reverse exchange, a key head has copies from several ranks
        for part in split.parts:
            sources.setdefault(part, []).append(by_part[split.peer, part.number])
    result_parts = [ResultPart(part, tuple(of)) for part, of in sources.items()]
    local_parts = tuple(
        x for x in result_parts if all(isinstance(of, TensorPart) for of in x.sources)
    )
    received_parts = tuple(x for x in result_parts if any(isinstance(of, int) for of in x.sources))
    return AllToAllMessages(
        packed_messages(outgoing, shapes, is_sent=True),
        receives,
        local_parts,
        received_parts,
        results,
    )


# Note [Copies beside messages]: on a GPU, copies run on the current stream and messages on that of
# the process group. The copies of what stays on this rank run beside the messages, all others
# before or after them: see Note [Streams] in `dtensor_ring/transport/rotation.py`.
def run_all_to_all(
    tensors: Sequence[Tensor], plan: AllToAllMessages, transport: Transport, label: Label
) -> list[Tensor]:
    """Return the tensors after the all-to-all: new, token-major, `(B, n, T, H)`.

    The parts that stay on this rank are copied while the messages travel.

    Args:
        tensors: `(B, N, L, H)`, on one device; dtypes and head dims may differ.
        plan: the plan of the all-to-all.
        transport: moves the messages.
        label: names the all-to-all in a profile.
    """
    transport.prepare(tensors[0].device)
    transport.at(label)
    results = [empty(x, shape, TOKEN_MAJOR) for x, shape in zip(tensors, plan.shapes, strict=True)]
    sent, received = (_buffer(x, tensors, transport) for x in (plan.sends, plan.receives))
    with label("pack"):
        for packed, copy in zip(plan.sends.views(sent, tensors), plan.sends.copies, strict=True):
            pack(packed, copy.part.heads_of(tensors), copy.part.cols)
    works = transport.start(plan.receives.started(received), plan.sends.started(sent))
    transport.at(label)
    try:
        # What stays on this rank is copied while messages travel.
        with label("unpack"):
            _unpack(results, plan.local_parts, tensors, [])
    except BaseException:
        # Messages still read and write these buffers, which must live until they end.
        hold_until_complete(works, (sent, received))
        raise
    with label("wait"):
        for work in works:
            work.wait()
    transport.at(label)
    with label("unpack"):
        _unpack(results, plan.received_parts, tensors, plan.receives.views(received, tensors))
    for side_messages, buffer in ((plan.sends, sent), (plan.receives, received)):
        if side_messages.num_bytes:
            transport.free(buffer)
    return results


def _buffer(
    side_messages: PackedMessages, tensors: Sequence[Tensor], transport: Transport
) -> Tensor:
    """Return memory for the messages of a side; the transport allocates it unless it is empty."""
    if side_messages.num_bytes:
        return transport.allocate(side_messages.num_bytes, tensors[0].device)
    return tensors[0].new_empty(0, dtype=torch.uint8)


def _unpack(
    results: Sequence[Tensor],
    result_parts: Sequence[ResultPart],
    tensors: Sequence[Tensor],
    copies: Sequence[Tensor],
) -> None:
    """Sum the sources of each arrival, and copy the sum into the results."""
    for part, sources in result_parts:
        found = [copies[x] if isinstance(x, int) else _taken(x, tensors) for x in sources]
        unpack(part.heads_of(results), _sum(found), part.cols)


def _sum(parts: list[Tensor]) -> Tensor:
    """Return the sum in the order of the ranks, rounded once."""
    first, *others = parts
    if not others:
        return first
    # A copy, as `first` may be an input of the caller, or a buffer of the transport.
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)


def _taken(part: TensorPart, tensors: Sequence[Tensor]) -> Tensor:
    """Return a part of a tensor: a view if its columns are one span, else a packed copy."""
    x, cols = part.heads_of(tensors), part.cols
    if len(cols.spans) == 1:
        return columns(x, cols.spans[0])
    packed = empty(x, (*x.shape[:2], len(cols), x.shape[3]), TOKEN_MAJOR)
    pack(packed, x, cols)
    return packed
