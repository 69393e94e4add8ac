"""What a rank sends and holds in an attention, and in what goes on around it, by its plan.

Where queries choose their keys, which ones depends on the content of a batch. Costs are those of a
batch in which each key that a rank's queries see is chosen by one of them: no batch costs more, and
one with many more queries than keys on a rank hardly less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import torch

from dtensor_ring.all_to_all.plan import AllToAllPlan
from dtensor_ring.all_to_all.rounded_keys import room_of_rounded
from dtensor_ring.all_to_all.run import aligned
from dtensor_ring.lab.problem import TensorSizes, text_entries
from dtensor_ring.lab.schedule import Traffic, largest_packet, shard_traffic, sum_traffic
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.selected.plan import (
    ALL,
    MAX_SELECTED,
    KeyPositions,
    SelectedTraffic,
    key_route,
    selected_traffic,
)
from dtensor_ring.transport.quantised_rotation import packet_size
from dtensor_ring.transport.rotation import goes_apart
from dtensor_ring.transport.transport import QUANTISED


@dataclass(frozen=True)
class Cost:
    """What a rank sends and holds in one direction of an attention; sizes are in bytes.

    Attributes:
        sent: bytes that the rank sends.
        received: bytes that the rank receives.
        messages: number of messages that the rank sends.
        held: the most bytes at once in message buffers and tensors of an all-to-all. Large
            contiguous keys and values are sent without a buffer, but count as if they had one.
    """

    sent: int = 0
    received: int = 0
    messages: int = 0
    held: int = 0

    def __add__(self, other: Cost) -> Cost:
        return by_field(sum, [self, other])


def by_field(of: Callable[[Iterable[int]], int], costs: Iterable[Cost]) -> Cost:
    """Return the sum or the maximum of each field, as `of` computes it."""
    return Cost(*map(of, zip(*map(astuple, costs), strict=True)))


def rank_costs(
    plan: Plan, all_to_all: AllToAllPlan | None, sizes: TensorSizes
) -> tuple[Cost, Cost]:
    """Return the forward and backward cost of one rank, with the all-to-alls around its plan."""
    num_heads, num_key_heads = sizes.heads_after(all_to_all)
    rounded = sizes.kv_dtype if sizes.kv_dtype in QUANTISED and all_to_all is not None else None
    forward, sums = ring_costs(plan, sizes, num_key_heads, rounded is not None)
    backward = forward + sums
    if all_to_all is None:
        return forward, backward
    # Forward sends queries, keys and values and returns outputs; backward does the reverse.
    (heads, key_heads), (head_dim, value_dim) = sizes.heads, sizes.head_dims
    inputs = (heads, head_dim), (key_heads, head_dim), (key_heads, value_dim)
    output = ((heads, value_dim),)
    there = all_to_all_cost(all_to_all, sizes, inputs, kv_dtype=rounded)
    given = all_to_all_cost(all_to_all, sizes, output)
    back, returned = (all_to_all_cost(all_to_all, sizes, x, is_back=True) for x in (output, inputs))
    token = (num_heads + num_key_heads) * sum(sizes.head_dims) * sizes.batch * sizes.itemsize
    kept = token * all_to_all.num_tokens[1]
    travelling = 0
    if rounded is not None and plan.owners is not None and plan.owners.num_groups > 1:
        of_keys = packet_size(rounded, sizes.batch, num_key_heads, sizes.head_dims)
        travelling = room_of_rounded(of_keys, all_to_all.num_tokens[1], all_to_all.heads)
    # Backward also holds the gradients of query, key, value and output.
    return (
        _around(there, forward, back, kept + travelling),
        _around(given, backward, returned, 2 * kept + travelling),
    )


def _around(first: Cost, inner: Cost, last: Cost, kept: int) -> Cost:
    """Add three costs that follow one another while `kept` bytes stay allocated."""
    return replace(first + inner + last, held=kept + max(first.held, inner.held, last.held))


def ring_costs(
    plan: Plan, sizes: TensorSizes, num_key_heads: int, are_rounded: bool = False
) -> tuple[Cost, Cost]:
    """Return the cost of the messages of keys and values, and of those of their gradients.

    Args:
        plan: the plan of the rank.
        sizes: the sizes of the attention.
        num_key_heads: key heads of the rank.
        are_rounded: whether an all-to-all brought them in eight bits, see Note [Rounded once].
    """
    owners = plan.owners if are_rounded else None
    shards, sums = (
        packet_size(dtype, sizes.batch, num_key_heads, sizes.head_dims, owners)
        for dtype in (sizes.kv_dtype, sizes.sum_dtype)
    )
    # Bytes and scales are one message, however large.
    may_part = not shards.block
    return (
        _moved(shard_traffic(plan, shards), largest_packet(plan, shards), may_part),
        _moved(sum_traffic(plan, sums), largest_packet(plan, sums), may_part=True),
    )


def _moved(traffic: Traffic, room: int, may_part: bool) -> Cost:
    """Return the cost of messages: sizes and the `room` of a buffer are in bytes."""
    num_second = sum(map(goes_apart, traffic.owned)) if may_part else 0
    num_sent, held = traffic.num_sent + num_second, traffic.num_buffers * room
    return Cost(traffic.sent, traffic.received, num_sent, held)


def all_to_all_cost(
    all_to_all: AllToAllPlan,
    sizes: TensorSizes,
    tensors: Sequence[tuple[int, int]],
    is_back: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> Cost:
    """Return the cost of one all-to-all.

    Args:
        all_to_all: the plan of the rank.
        sizes: the sizes of the attention.
        tensors: pairs of a head count and a head dim.
        is_back: whether heads are given for tokens.
        kv_dtype: the dtype of 8 bits of the last two tensors, keys and values; `None` for that of
            all tensors.
    """
    num_key_heads = sizes.heads[1]
    leaving, coming = Counter[int](), Counter[int]()
    there, here = (coming, leaving) if is_back else (leaving, coming)
    together: list[tuple[torch.dtype, int, tuple[int, ...]]]
    together = [(sizes.dtype, count, (head_dim,)) for count, head_dim in tensors]
    if kv_dtype is not None:
        together[-2:] = [(kv_dtype, num_key_heads, tuple(dim for _, dim in tensors[-2:]))]
    for dtype, num_heads, head_dims in together:
        for num_bytes, amounts in ((there, all_to_all.sent), (here, all_to_all.received)):
            for peer, (tokens, heads) in amounts(num_heads, num_key_heads).items():
                of_tokens = packet_size(dtype, sizes.batch, heads, head_dims)
                num_bytes[peer] += of_tokens.of_shard(tokens)
    held = sum(aligned(size) for side in (leaving, coming) for size in side.values())
    num_messages = sum(size > 0 for size in leaving.values())  # empty messages are not sent
    return Cost(leaving.total(), coming.total(), num_messages, held)


# The route that brings each rank the keys that its queries see, and no more.
SEEN = "direct"

# What a config calls the keys of a query, the numbers of an index key, and the parts of a latent.
IN_CONFIG = "index_topk", "index_head_dim", "kv_lora_rank", "qk_rope_head_dim"


class ChosenKeys(NamedTuple):
    """How many keys a query chooses, and how large keys are.

    Attributes:
        num_keys: keys of a query, `index_topk` in a config.
        index_dim: numbers of a token's index key, `index_head_dim`.
        token_dim: numbers of a token that travel where it is chosen: latent and rotary part of
            multi-head latent attention, else key and value of all heads.
    """

    num_keys: int
    index_dim: int
    token_dim: int


def chosen_keys(given: Any) -> ChosenKeys:
    """Check three numbers, or read them from a config of transformers.

    Raises:
        TypeError: if they are something else.
        ValueError: if one is out of range, or a config has none.

    >>> chosen_keys((2048, 128, 576)).token_dim
    576
    >>> config = dict(index_topk=2048, index_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64)
    >>> chosen_keys(config) == chosen_keys((2048, 128, 576))
    True
    """
    if not isinstance(given, tuple | list):
        given = _of_config(given)
    if len(given) != 3:
        raise TypeError(
            "chosen must be the keys of a query, the numbers of an index key and those of a token "
            f"that is chosen, such as (2048, 128, 576), or a config, got {given!r}"
        )
    num_keys = as_count("keys of a query", given[0], 1, MAX_SELECTED)
    return ChosenKeys(num_keys, *(as_count("numbers of a key", x, 1) for x in given[1:]))


def _of_config(config: Any) -> tuple[int, int, int]:
    """Return the numbers of a model with latents.

    Raises:
        ValueError: if the config lacks one of them.
    """
    entries = text_entries(config)
    if missing := [x for x in IN_CONFIG if not entries.get(x)]:
        raise ValueError(
            f"the config of {entries.get('model_type') or 'model'} lacks {', '.join(missing)}, so "
            "its layers choose no latents; give the three numbers: (2048, 128, 576)"
        )
    num_keys, index_dim, *latent = (entries[x] for x in IN_CONFIG)
    return num_keys, index_dim, sum(latent)


def index_cost(plan: Plan, sizes: TensorSizes, index_dim: int) -> Cost:
    """Return the messages of the index keys, which have one head, no values and no gradients.

    Args:
        plan: the plan of the selection.
        sizes: of the attention.
        index_dim: numbers of an index key.
    """
    own = sizes._replace(head_dims=(index_dim, 0), kv_dtype=sizes.dtype)
    return ring_costs(plan, own, num_key_heads=1)[0]


def most_counts(seen: Plan | None, positions: KeyPositions, rank: int) -> list[list[int]]:
    """Return the most keys that this rank receives from each rank, and that it sends to each.

    Args:
        seen: this rank's plan by the route `SEEN`; `None` if all keys travel.
        positions: the keys of all ranks.
        rank: this rank.
    """
    ranks = range(positions.world_size)
    if seen is None:
        return [[positions.num_local(x) for x in ranks], [positions.num_local(rank)] * len(ranks)]
    come, go = Counter[int](), Counter[int]()
    for hop in seen.shards:
        come.update({x.source: len(x.cols) for x in hop.receives})
        go.update({x.peer: len(x.cols) for x in hop.sends})
    return [[counts[x] for x in ranks] for counts in (come, go)]


def moved_costs(
    seen: Plan,
    positions: KeyPositions,
    num_chosen: int,
    bytes_of: tuple[int, int],
    route: str | None = None,
) -> tuple[Cost, Cost]:
    """Return the messages of chosen keys forward, and those of keys and gradients backward.

    Args:
        seen: this rank's plan by the route `SEEN`.
        positions: the keys of all ranks.
        num_chosen: the number of keys of a query.
        bytes_of: bytes of the key and value of a token, over batch and heads, and of gradients.
        route: "selected", "all", or `None` for the one that is chosen by a bound.
    """
    rank, route = seen.rank, key_route(route, num_chosen, positions.end)
    wanted, given = most_counts(None if route == ALL else seen, positions, rank)
    asked = positions, rank, wanted, given, *bytes_of, route
    received, sent = selected_traffic(*asked)
    others = [x for x in range(positions.world_size) if x != rank]
    num_asked = sum(positions.num_local(x) > 0 for x in others) if sent.requests else 0
    num_come, num_go = (sum(counts[x] > 0 for x in others) for counts in (wanted, given))
    # Keys that arrive stay until the attention ends; those that leave are copies, but for whole
    # shards. Then gradients of both travel the other way.
    whole = positions.num_local(rank)
    copied = bytes_of[0] * sum(given[x] for x in others if given[x] < whole)
    forward = Cost(*_both(sent, received), num_asked + num_go, received.keys + copied)
    gradients = received.gradients + sent.gradients
    return forward, Cost(
        sent=forward.sent + sent.gradients,
        received=forward.received + received.gradients,
        messages=forward.messages + num_come,
        held=received.keys + max(copied, gradients),
    )


def _both(*sides: SelectedTraffic) -> tuple[int, int]:
    """Return the bytes of requests and keys that are sent, and those that are received."""
    sent, received = (x.requests + x.keys for x in sides)
    return sent, received
