"""Tensors exchanged between the ranks of an axis: tokens for heads, or one layout for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.memory import TOKEN_MAJOR, columns, empty
from dtensor_ring.compute.ranges import pack, unpack
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.exchanges.exchange import Exchange
from dtensor_ring.planning.values.cache import cached_bytes
from dtensor_ring.planning.values.span import Span, length
from dtensor_ring.transport.delivery import Side
from dtensor_ring.transport.messages import Geometry, Mail, Split, TensorPart, mail_of
from dtensor_ring.transport.protocol import Transport


class Arrival(NamedTuple):
    """A part of a result, and what it is the sum of, in the order of the ranks."""

    part: TensorPart
    sources: tuple[int | TensorPart, ...]
    """Copies that come, and a part that stays on this rank."""


class Traded(NamedTuple):
    """An exchange of tensors: what leaves, what comes, and what results."""

    sends: Mail
    receives: Mail
    stays: tuple[Arrival, ...]
    """Of which nothing comes from other ranks."""
    comes: tuple[Arrival, ...]
    """But for what is received where it belongs."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the results."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, in bytes, an estimate."""
        mails = self.sends, self.receives
        return 1000 + 600 * sum(len(x.copies) + len(x.messages) for x in mails)


@cached_bytes(2**24, lambda found: found.num_bytes)
def traded(
    exchange: Exchange,
    num_heads: tuple[int, ...],
    num_key_heads: int,
    geometries: tuple[Geometry, ...],
    is_back: bool = False,
) -> Traded:
    """The exchange of tensors; 16 MiB are kept.

    Args:
        exchange: of tokens.
        num_heads: of each tensor, on the side that has all of them.
        num_key_heads: that heads are dealt by.
        geometries: of the tensors before.
        is_back: whether it goes back.

    Raises:
        ValueError: if the heads cannot be dealt.
    """

    def heads(rank: int) -> tuple[Span, ...]:
        shard = exchange.head_shard(rank, num_key_heads)
        return tuple(shard.span(count, num_key_heads) for count in num_heads)

    own = heads(exchange.rank)
    here = tuple((0, length(span)) for span in own)
    sends = [Split(tokens, heads(tokens.peer)) for tokens in exchange.sends]
    receives = [Split(tokens, here) for tokens in exchange.receives]
    before, after = exchange.num_tokens
    ways = (receives, sends) if is_back else (sends, receives)
    counts = num_heads if is_back else tuple(map(length, own))
    return _traded(exchange.rank, *ways, geometries, counts, before if is_back else after)


def _traded(
    rank: int,
    leaving: list[Split],
    coming: list[Split],
    geometries: tuple[Geometry, ...],
    num_heads: tuple[int, ...],
    num_tokens: int,
) -> Traded:
    """Plan the messages, and the copies to results that have these heads and tokens."""
    results = tuple(
        Geometry.token_major(
            (geometry.shape[0], heads, num_tokens, geometry.shape[3]), geometry.itemsize
        )
        for geometry, heads in zip(geometries, num_heads, strict=True)
    )
    peers = dict[TensorPart, list[int]]()
    for split in coming:  # on the way back, copies of a key head come from several
        for part in split.parts:
            peers.setdefault(part, []).append(split.tokens.peer)
    summed = {(peer, part.number) for part, of in peers.items() if len(of) > 1 for peer in of}
    outgoing, incoming = ([x for x in side if x.tokens.peer != rank] for side in (leaving, coming))
    sends = mail_of(outgoing, geometries, is_sent=True)
    receives = mail_of(incoming, results, is_sent=False, copied=summed)
    staying = [part for split in leaving if split.tokens.peer == rank for part in split.parts]
    sources = {
        part: tuple(
            staying[part.number] if peer == rank else receives.copy_of[peer, part.number]
            for peer in of
            if peer == rank or (peer, part.number) in receives.copy_of
        )
        for part, of in peers.items()
    }
    stays = tuple(Arrival(part, found) for part, found in sources.items() if peers[part] == [rank])
    comes = tuple(
        Arrival(part, found) for part, found in sources.items() if found and peers[part] != [rank]
    )
    return Traded(sends, receives, stays, comes, tuple(x.shape for x in results))


def exchange_tensors(
    tensors: Sequence[Tensor],
    plan: Traded,
    transport: Transport,
    label: Label,
) -> list[Tensor]:
    """The tensors after the exchange, `(B, n, T, H)`, fresh and token-major.

    What stays on this rank is copied while the messages travel.

    Args:
        tensors: `(B, N, L, H)`, on one device; dtypes and head dims may differ.
        plan: what leaves, and what comes.
        transport: what moves the messages.
        label: of the exchange, in a profile.
    """
    transport.prepare(tensors[0].device)
    transport.at(label)
    results = [empty(x, shape, TOKEN_MAJOR) for x, shape in zip(tensors, plan.shapes, strict=True)]
    outgoing = Side(plan.sends, tensors, transport)
    incoming = Side(plan.receives, results, transport)
    with label("pack"):
        outgoing.pack()
    works = transport.start(incoming.messages(), outgoing.messages())
    transport.at(label)
    with label("unpack"):
        _unpack(results, plan.stays, tensors, [])
    with label("wait"):
        for work in works:
            work.wait()
    transport.at(label)
    with label("unpack"):
        _unpack(results, plan.comes, tensors, incoming.copies)
    outgoing.free()
    incoming.free()
    return results


def _unpack(
    results: Sequence[Tensor],
    arrivals: Sequence[Arrival],
    tensors: Sequence[Tensor],
    copies: Sequence[Tensor],
) -> None:
    """Copy what came, and what stays of the tensors, to where it belongs."""
    for part, sources in arrivals:
        found = [copies[x] if isinstance(x, int) else _taken(x, tensors) for x in sources]
        unpack(part.heads_of(results), _sum(found), part.cols)


def _sum(parts: list[Tensor]) -> Tensor:
    """The sum in the order of the ranks, rounded once."""
    first, *others = parts
    if not others:
        return first
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)


def _taken(part: TensorPart, tensors: Sequence[Tensor]) -> Tensor:
    """A part side by side: a view if it lies so."""
    x, cols = part.heads_of(tensors), part.cols
    if len(cols.spans) == 1:
        return columns(x, cols.spans[0])
    packed = empty(x, (*x.shape[:2], len(cols), x.shape[3]), TOKEN_MAJOR)
    pack(packed, x, cols)
    return packed
