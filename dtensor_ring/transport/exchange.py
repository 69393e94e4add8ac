"""The messages of an exchange of tokens and heads: one to each peer, with its part of all tensors.

Note [Copies]: what leaves is packed once, into its message, and what comes is unpacked once, to
where it belongs. What stays on this rank is copied while the messages travel.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.memory import TOKEN_MAJOR, empty, part_of, region, strides
from dtensor_ring.compute.ranges import pack, unpack
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.exchanges.exchange import Exchange
from dtensor_ring.planning.routes.columns import Cols
from dtensor_ring.planning.values.span import Span, length
from dtensor_ring.transport.protocol import P2P, Transport

ALIGNED = 16
"""Bytes that messages and tensors within them begin at a multiple of: any dtype can be there."""


class Split(NamedTuple):
    """One side of a message: the tokens, and the heads of each tensor, that it has."""

    peer: int
    cols: Cols
    heads: tuple[Span, ...]

    def part(self, number: int, x: Tensor) -> Tensor:
        """All tokens of the heads of tensor number `number`."""
        begin, end = self.heads[number]
        return x.narrow(1, begin, end - begin)


class Traded(NamedTuple):
    """An exchange of tensors: what leaves, what comes, and how many tokens and heads result."""

    sends: tuple[Split, ...]
    receives: tuple[Split, ...]
    num_tokens: int
    num_heads: tuple[int, ...]


def traded(
    exchange: Exchange, num_heads: Sequence[int], num_key_heads: int, is_back: bool = False
) -> Traded:
    """The exchange of tensors that have so many heads before it, or after it if it goes back.

    Raises:
        ValueError: if the heads cannot be dealt.
    """

    def spans(rank: int) -> tuple[Span, ...]:
        shard = exchange.head_shard(rank, num_key_heads)
        return tuple(shard.span(count, num_key_heads) for count in num_heads)

    own = tuple((0, length(span)) for span in spans(exchange.rank))
    whole = tuple(Split(peer, cols, spans(peer)) for peer, cols in exchange.sends)
    parts = tuple(Split(peer, cols, own) for peer, cols in exchange.receives)
    before, after = exchange.num_tokens
    if is_back:
        return Traded(parts, whole, before, tuple(num_heads))
    return Traded(whole, parts, after, tuple(end for _, end in own))


def exchange_tensors(
    tensors: Sequence[Tensor], rank: int, plan: Traded, transport: Transport, label: Label
) -> list[Tensor]:
    """The tensors after the exchange, `(B, n, T, H)`, fresh and token-major.

    Args:
        tensors: `(B, N, L, H)`, on one device; dtypes and head dims may differ.
        rank: this rank's index on the axis.
        plan: what leaves, and what comes.
        transport: what moves the messages.
        label: of the exchange, in a profile.
    """
    device = tensors[0].device
    transport.prepare(device)
    transport.at(label)
    sends, receives = ([x for x in side if x.peer != rank] for side in plan[:2])
    # Copies of a key head are packed once, for all ranks that get one.
    outgoing = _Messages(transport, tensors, sends, [(x.cols, x.heads) for x in sends], device)
    incoming = _Messages(transport, tensors, receives, [x.peer for x in receives], device)
    with label("pack"):
        outgoing.fill(tensors)
    works = transport.start(incoming.messages(), outgoing.messages())
    transport.at(label)
    results = [
        empty(x, (x.shape[0], heads, plan.num_tokens, x.shape[3]), TOKEN_MAJOR)
        for x, heads in zip(tensors, plan.num_heads, strict=True)
    ]
    arrived = dict(incoming.views)
    for split in plan.sends:
        if split.peer == rank:  # what stays has no message
            arrived[rank] = [_taken(split.part(i, x), split.cols) for i, x in enumerate(tensors)]
    regions = _regions(plan.receives, len(tensors))
    with label("unpack"):
        _unpack(results, [x for x in regions if x.peers == [rank]], arrived)
    with label("wait"):
        for work in works:
            work.wait()
    with label("unpack"):
        _unpack(results, [x for x in regions if x.peers != [rank]], arrived)
    outgoing.free()
    incoming.free()
    return results


class _Region(NamedTuple):
    """Tokens and heads of one result, and the peers that they come from."""

    number: int
    split: Split
    peers: list[int]


def _regions(splits: Sequence[Split], num_tensors: int) -> list[_Region]:
    """What the results consist of; on the way back, copies of a key head come from several."""
    found: dict[tuple[int, Cols, Span], _Region] = {}
    for number in range(num_tensors):
        for split in splits:
            what = number, split.cols, split.heads[number]
            found.setdefault(what, _Region(number, split, [])).peers.append(split.peer)
    return list(found.values())


def _unpack(
    results: Sequence[Tensor], regions: Sequence[_Region], arrived: dict[int, list[Tensor]]
) -> None:
    for number, split, peers in regions:
        part = _sum([arrived[peer][number] for peer in peers])
        unpack(split.part(number, results[number]), part, split.cols)


def _sum(parts: list[Tensor]) -> Tensor:
    """The sum in the order of the ranks, rounded once."""
    first, *others = parts
    if not others:
        return first
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)


def _taken(x: Tensor, cols: Cols) -> Tensor:
    """Columns of a tensor side by side: a view if they lie so."""
    if len(cols.spans) == 1:
        return part_of(x, region(None, cols.spans[0]))
    packed = empty(x, (*x.shape[:2], len(cols), x.shape[3]), TOKEN_MAJOR)
    pack(packed, x, cols)
    return packed


class _Messages:
    """Messages to peers or from them, in one buffer.

    Args:
        transport: what allocates it.
        tensors: whose batch, head dims and dtypes the messages have.
        splits: what each of them has.
        contents: of each split; those that are equal share their memory.
        device: of the buffer.
    """

    def __init__(
        self,
        transport: Transport,
        tensors: Sequence[Tensor],
        splits: Sequence[Split],
        contents: Sequence[Hashable],
        device: torch.device,
    ) -> None:
        self._transport = transport
        self._splits: dict[Hashable, Split] = {}
        for content, split in zip(contents, splits, strict=True):
            self._splits.setdefault(content, split)
        shapes = [
            [(x.shape[0], length(span), len(split.cols), x.shape[3])
             for x, span in zip(tensors, split.heads, strict=True)]
            for split in self._splits.values()
        ]  # fmt: skip
        sizes = [
            [prod(shape) * x.itemsize for shape, x in zip(row, tensors, strict=True)]
            for row in shapes
        ]
        # Wide dtypes first: then each begins where it may without gaps.
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i].itemsize)
        self._buffer = transport.allocate(sum(_aligned(sum(row)) for row in sizes), device)
        made: dict[Hashable, tuple[Tensor, list[Tensor]]] = {}
        offset = 0
        for content, row, of_split in zip(self._splits, shapes, sizes, strict=True):
            flat = self._buffer[offset : offset + sum(of_split)]
            offset += _aligned(sum(of_split))
            views, begin = [tensors[0]] * len(tensors), 0
            for i in order:
                part = flat[begin : begin + of_split[i]].view(tensors[i].dtype)
                views[i] = part.as_strided(row[i], strides(row[i], TOKEN_MAJOR))
                begin += of_split[i]
            made[content] = flat, views
        by_peer = {x.peer: made[content] for x, content in zip(splits, contents, strict=True)}
        self._flats = {peer: flat for peer, (flat, _) in by_peer.items()}
        self.views = {peer: views for peer, (_, views) in by_peer.items()}
        """By peer, the part of each tensor in its message, `(B, n, C, H)`."""

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy what leaves."""
        for split in self._splits.values():
            for number, view in enumerate(self.views[split.peer]):
                pack(view, split.part(number, tensors[number]), split.cols)

    def messages(self) -> list[P2P]:
        """Nothing empty travels."""
        found = self._flats.items()
        return [P2P(flat, peer, source=peer) for peer, flat in found if flat.numel()]

    def free(self) -> None:
        """Give the buffer back."""
        self.views, self._flats = {}, {}
        self._transport.free(self._buffer)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED
