"""What attention sends and holds where queries choose their keys.

Which keys are chosen depends on the content of a batch. Costs are those of a batch in which each
key that a rank's queries see is chosen by one of them: no batch costs more, and one with many more
queries than keys on a rank hardly less.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.lab.problem import text_entries
from dtensor_ring.lab.recorded import Cost, Recorder, unlaunched
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.ranges import as_count, length
from dtensor_ring.selected.moved_keys import SelectedKeys
from dtensor_ring.selected.plan import MAX_SELECTED, KeyPositions, key_route
from dtensor_ring.selected.run import IndexQueries, KeyChoice, ring_select

# The route that brings each rank the keys that its queries see, and no more.
SEEN = "direct"


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
    num_keys, index_dim, token_dim = given
    return ChosenKeys(
        num_keys=as_count("keys of a query", num_keys, 1, MAX_SELECTED),
        index_dim=as_count("numbers of a key", index_dim, 1),
        token_dim=as_count("numbers of a key", token_dim, 1),
    )


# What a config calls the keys of a query, the numbers of an index key, and the parts of a latent.
IN_CONFIG = "index_topk", "index_head_dim", "kv_lora_rank", "qk_rope_head_dim"


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


def index_cost(plan: Plan, key: Tensor, positions: KeyPositions) -> Cost:
    """Return the messages of the index keys, which have one head, no values and no gradients.

    Args:
        plan: the plan of the selection.
        key: this rank's index keys, `(B, 1, C, Di)`, on the meta device.
        positions: the keys of all ranks.
    """
    transport, rows = Recorder(), plan.num_local[0]
    query = key.new_empty(key.shape[0], 1, rows, key.shape[3])
    own = IndexQueries(query, None, query.new_empty(rows, dtype=torch.int32))
    ring_select(own, key, unlaunched(plan), KeyChoice(1), positions, transport)
    return transport.cost


class SeenKeys(SelectedKeys):
    """Asks for each key that local queries see, and is asked for each that others see.

    Args:
        seen: this rank's plan by the route `SEEN`.
        keys: as `SelectedKeys` takes them.
    """

    def __init__(self, seen: Plan, *keys: Any) -> None:
        super().__init__(*keys)
        self._come, self._go = Counter[int](), Counter[int]()
        for hop in seen.shards:
            self._come.update({x.source: len(x.cols) for x in hop.receives})
            self._go.update({x.peer: len(x.cols) for x in hop.sends})

    def _needs(self, selected: Tensor) -> list[Tensor]:
        counts = map(self._positions.num_local, range(self._positions.world_size))
        needs = [selected.new_empty(count, dtype=torch.bool) for count in counts]
        needs[self._rank] = needs[self._rank][:0]
        return needs

    def _wanted(self, needs: list[Tensor]) -> list[Tensor]:
        return [x.new_empty(self._come[peer], dtype=torch.int64) for peer, x in enumerate(needs)]

    def _given(self, asked: list[Tensor]) -> list[Tensor]:
        return [x.new_empty(self._go[peer], dtype=torch.int64) for peer, x in enumerate(asked)]


def moved_costs(
    seen: Plan,
    positions: KeyPositions,
    num_chosen: int,
    rows: Tensor,
    sum_dtype: torch.dtype,
    route: str | None = None,
) -> tuple[Cost, Cost]:
    """Return the messages of chosen keys forward, and those of keys and gradients backward.

    Args:
        seen: this rank's plan by the route `SEEN`.
        positions: the keys of all ranks.
        num_chosen: the number of keys of a query.
        rows: keys and values of this rank, `(B, Nkv, C, D)`, on the meta device.
        sum_dtype: the dtype in which gradients travel.
        route: "selected", "all", or `None` for the one that is chosen by a bound.
    """
    there, back = Recorder(), Recorder()
    shape, found = (rows.shape[3], (0, 0)), key_route(route, num_chosen, positions.end)
    keys = SeenKeys(seen, rows, shape, positions, seen.rank, there, "forward")
    moved = keys.moved(rows.new_empty(0, dtype=torch.int32), found)
    grads = SeenKeys(seen, rows, shape, positions, seen.rank, back, "backward")
    grads.summed(moved, moved.residents.rows.float(), sum_dtype)
    # Keys that arrive stay until the attention ends; those that leave are copies, but for whole
    # shards. Then gradients of both travel the other way.
    own, row = length(moved.spans[seen.rank]), moved.residents.rows[:1].nbytes
    arrived = (len(moved.residents.rows) - own) * row
    copied = sum(len(x) for x in moved.given if len(x) < own) * row
    forward = replace(there.cost, held=arrived + copied)
    travelling = back.cost.sent + back.cost.received
    return forward, replace(forward + back.cost, held=arrived + max(copied, travelling))
