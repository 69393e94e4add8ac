"""What it costs to let queries choose their keys, and to bring them those, by the plans of a rank.

Which keys are chosen depends on the content of a batch. Costs are those of a batch in which each
key that a rank's queries see is chosen by one of them: no batch costs more, and one with many more
queries than keys on a rank hardly less.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

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
from dtensor_ring.simulate.message_costs import Cost, ring_costs
from dtensor_ring.simulate.model_config import text_entries
from dtensor_ring.simulate.sizes import TensorSizes

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
