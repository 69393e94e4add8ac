"""What one rank sends and holds in an attention by some strategy, read from its plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from dtensor_ring.planning.exchanges.exchange import Amount, Exchange
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.traffic import Traffic, largest_packet, shard_traffic, sum_traffic
from dtensor_ring.planning.values.span import length
from dtensor_ring.transport.messages import aligned
from dtensor_ring.transport.packet import goes_apart


@dataclass(frozen=True)
class Cost:
    """What a rank sends and holds in one direction of an attention; sizes are in bytes."""

    sent: int = 0
    received: int = 0
    messages: int = 0
    """That it sends."""
    held: int = 0
    """At most at a time: buffers of messages, and what it has while tokens are traded for heads.

    Keys and values that need no buffer, as they are large and lie in one piece of memory, count as
    if they did.
    """

    def __add__(self, other: Cost) -> Cost:
        return by_field(sum, [self, other])


def by_field(of: Callable[[Iterable[int]], int], costs: Iterable[Cost]) -> Cost:
    """The sum of each field, or the largest of each."""
    return Cost(*map(of, zip(*map(astuple, costs), strict=True)))


class Sizes(NamedTuple):
    """What the tensors of an attention are like."""

    heads: tuple[int, int]
    """Of queries, and of keys and values."""
    head_dims: tuple[int, int]
    """Of queries and keys, and of values."""
    batch: int
    itemsize: int
    kv_itemsize: int
    """Of keys and values on their way."""
    sum_itemsize: int
    """Of sums of their gradients."""

    def heads_after(self, exchange: Exchange | None) -> tuple[int, int]:
        """Query heads and key heads of a rank after an exchange, all of them without one."""
        if exchange is None:
            return self.heads
        of_rank = exchange.head_shard(exchange.rank, self.heads[1])
        query, key = (length(of_rank.span(count, self.heads[1])) for count in self.heads)
        return query, key


def rank_costs(plan: Plan, exchange: Exchange | None, sizes: Sizes) -> tuple[Cost, Cost]:
    """Forward and backward of one rank, which may exchange before its plan and after it."""
    num_heads, num_key_heads = sizes.heads_after(exchange)
    column = sizes.batch * num_key_heads * sum(sizes.head_dims)
    room = largest_packet(plan)
    forward = moved(shard_traffic(plan), column * sizes.kv_itemsize, room)
    backward = forward + moved(sum_traffic(plan), column * sizes.sum_itemsize, room)
    if exchange is None:
        return forward, backward
    # Queries, keys and values go, outputs come back; then gradients, the other way round.
    (heads, key_heads), (head_dim, value_dim) = sizes.heads, sizes.head_dims
    inputs = (heads, head_dim), (key_heads, head_dim), (key_heads, value_dim)
    output = ((heads, value_dim),)
    there, given = (traded(exchange, sizes, tensors) for tensors in (inputs, output))
    back, returned = (traded(exchange, sizes, x, is_back=True) for x in (output, inputs))
    token = (num_heads + num_key_heads) * sum(sizes.head_dims) * sizes.batch * sizes.itemsize
    kept = token * exchange.num_tokens[1]
    # Backward has the gradients beside query, key, value and output.
    return _around(there, forward, back, kept), _around(given, backward, returned, 2 * kept)


def _around(first: Cost, inner: Cost, last: Cost, kept: int) -> Cost:
    """All of them, one after the other, and what stays meanwhile."""
    return replace(first + inner + last, held=kept + max(first.held, inner.held, last.held))


def moved(traffic: Traffic, column: int, room: int) -> Cost:
    """Messages of columns of so many bytes, in buffers of so many columns."""
    held = traffic.num_buffers * room * column
    num_second = sum(goes_apart(cols * column) for cols in traffic.owned)
    num_sent = traffic.num_sent + num_second
    return Cost(traffic.sent * column, traffic.received * column, num_sent, held)


def traded(
    exchange: Exchange, sizes: Sizes, tensors: Sequence[tuple[int, int]], is_back: bool = False
) -> Cost:
    """The cost of one exchange; `tensors` are pairs of a number of heads and a head dim."""
    num_key_heads = sizes.heads[1]
    leaving, coming = Counter[int](), Counter[int]()
    for num_heads, head_dim in tensors:
        there, here = (leaving, coming) if not is_back else (coming, leaving)
        _add(there, exchange.sent(num_heads, num_key_heads), sizes, head_dim)
        _add(here, exchange.received(num_heads, num_key_heads), sizes, head_dim)
    held = sum(aligned(size) for side in (leaving, coming) for size in side.values())
    num_messages = sum(size > 0 for size in leaving.values())  # nothing empty travels
    return Cost(leaving.total(), coming.total(), num_messages, held)


def _add(
    num_bytes: Counter[int], amounts: Mapping[int, Amount], sizes: Sizes, head_dim: int
) -> None:
    """Add the bytes of a tensor to those of each peer."""
    for peer, (tokens, heads) in amounts.items():
        num_bytes[peer] += tokens * heads * head_dim * sizes.batch * sizes.itemsize
