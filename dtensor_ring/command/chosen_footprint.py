"""Count what an attention that chooses its keys allocates and sends, on the meta device.

Which keys are chosen is unknown there, as tensors have no content. So all keys that a rank sees
are taken to be chosen, and memory is that of all keys of all ranks. Chunks of queries are alike:
one of them runs, see Note [Dry run] in `footprint.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.command.null_transport import NullTransport
from dtensor_ring.compute.kernels import Saved
from dtensor_ring.compute.memory import empty, order_of, region
from dtensor_ring.ops.options import Call, unflatten
from dtensor_ring.planning.plan import Plan, Step
from dtensor_ring.planning.ranges import length
from dtensor_ring.planning.strategy import as_strategy
from dtensor_ring.planning.tile import FULL, Tile
from dtensor_ring.selected.listed_attention import (
    gathered_backward,
    gathered_forward,
    queries_at_once,
)
from dtensor_ring.selected.moved_keys import Moved, SelectedKeys
from dtensor_ring.selected.op import positions_of_keys
from dtensor_ring.selected.plan import ALL, KeyPositions
from dtensor_ring.selected.run import IndexQueries, KeyChoice, ring_select, rows_at_once
from dtensor_ring.simulate.chosen_keys import SEEN, index_cost, moved_costs
from dtensor_ring.simulate.message_costs import Cost
from dtensor_ring.simulate.sizes import TensorSizes


class Choice(NamedTuple):
    """A call of the selection op: which keys its queries may choose.

    Attributes:
        call: the options of the op.
        plan: the plan of the index keys.
        seen: the plan of the route that brings what queries see and no more.
        positions: the keys of all ranks.
    """

    call: Call
    plan: Plan
    seen: Plan
    positions: KeyPositions

    @classmethod
    def of(cls, query: Tensor, key: Tensor, *rest: Any) -> Choice:
        """Return the choice of a call, given the arguments of the op."""
        call = unflatten(rest[4:])
        request = call.request(query.shape[0])
        direct = request._replace(strategy=as_strategy(SEEN, request.world_size))
        plans = request.plan(query, key), direct.plan(query, key)
        return cls(call, *plans, positions_of_keys(request))

    def cost(self, key: Tensor) -> Cost:
        """Return the messages of index keys, of which `(B, 1, C, Di)` are this rank's."""
        return index_cost(self.plan, _sizes(key, self.call), key.shape[3])

    def moved(self, rows: Tensor, num_chosen: int, rest: Sequence[Any]) -> tuple[Cost, Cost]:
        """Return the messages of chosen keys, forward and backward.

        Args:
            rows: this rank's keys and values, `(B, Nkv, C, D)`.
            num_chosen: keys of a query.
            rest: the arguments of the op after the lists.
        """
        numbers = rows.shape[0] * rows.shape[1] * rows.shape[3]
        dtypes = rows.dtype, unflatten(tuple(rest[3:])).place.policy.sum_dtype(rows.dtype)
        bytes_of = numbers * dtypes[0].itemsize, numbers * dtypes[1].itemsize
        return moved_costs(self.seen, self.positions, num_chosen, bytes_of, rest[2])

    def loop(self, query: Tensor, key: Tensor, *rest: Any) -> None:
        """Run the loop of the selection, with one chunk of queries for each tile."""
        weights, k, block_size, local_blocks = rest[:4]
        choice = KeyChoice(k, self.call.scores.scale, block_size, local_blocks)
        of_rows = query.new_empty(query.shape[2], dtype=torch.int32)
        own = IndexQueries(query, weights, of_rows)
        steps = tuple(_one_chunk(step, query) for step in self.plan.steps)
        shorter = replace(self.plan, steps=steps)
        ring_select(own, key, shorter, choice, self.positions, NullTransport())


def _sizes(key: Tensor, call: Call) -> TensorSizes:
    """Return the sizes of index keys."""
    dtypes = key.dtype, key.dtype, call.place.policy.sum_dtype(key.dtype)
    return TensorSizes((1, 1), (key.shape[3], 0), key.shape[0], *dtypes)


def _one_chunk(step: Step, query: Tensor) -> Step:
    """Return a step whose tiles have the rows of one chunk, and see all of their columns."""

    def cut(tile: Tile) -> Tile:
        begin, end = tile.rows
        size = rows_at_once(query, length(tile.cols))
        return replace(tile, rows=(begin, min(end, begin + size)), mask=FULL)

    return replace(step, tiles=tuple(map(cut, step.tiles)))


def forward_loop(query: Tensor, rows: Tensor, selected: Tensor, rest: Sequence[Any]) -> None:
    """Bring all keys, and attend to them with a chunk of queries."""
    keys, moved, call = _all_keys(query, rows, rest, "forward")
    few = slice(min(query.shape[2], queries_at_once(selected, moved.residents.rows)))
    results = empty(query, (*query.shape[:3], rest[1] - rest[0]), order_of(query))
    scores = call.scores.scale, call.scores.sinks
    gathered_forward(query[:, :, few], moved.residents, selected[:, :, few], *scores)
    del results, keys


def backward_loop(
    saved: Saved, query: Tensor, rows: Tensor, selected: Tensor, rest: Sequence[Any]
) -> None:
    """Bring all keys, and send their gradients home."""
    keys, moved, call = _all_keys(query, rows, rest, "backward")
    few = slice(min(query.shape[2], queries_at_once(selected, moved.residents.rows)))
    grad_query = empty(query, query.shape, order_of(query))
    some = saved.region(region(None, (0, few.stop)))
    how = moved.residents, selected[:, :, few], call.scores.scale
    _, grad = gathered_backward(some, query[:, :, few], *how)
    keys.summed(moved, grad, call.place.policy.sum_dtype(rows.dtype))
    del grad_query


def _all_keys(
    query: Tensor, rows: Tensor, rest: Sequence[Any], ring: str
) -> tuple[SelectedKeys, Moved, Call]:
    """Return what moves keys, and the keys of all ranks, whose places no content decides."""
    begin, end, _, *options = rest
    call = unflatten(tuple(options))
    request = call.request(query.shape[0])
    shape, positions = (query.shape[3], (begin, end)), positions_of_keys(request)
    keys = SelectedKeys(rows, shape, positions, request.rank, NullTransport(), ring)
    return keys, keys.moved(query.new_empty(0, dtype=torch.int32), ALL), call
