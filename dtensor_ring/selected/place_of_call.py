"""Where the tokens of a call are, of local shards and of DTensors, and the ops on DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtensor_ring.dtensor.annotation import tag_compiled
from dtensor_ring.dtensor.attention import placed_shards
from dtensor_ring.dtensor.dispatch import handlers, local_call, ring_of_call
from dtensor_ring.dtensor.placement import (
    HEADS,
    SEQUENCE,
    Placements,
    Ring,
    local_of,
    placements_text,
    wrap,
)
from dtensor_ring.ops.options import Batch, Call, Place, flatten, unflatten
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.selected.op import select_op, selected_backward_op, selected_op


def placed_call(
    query: Tensor,
    key: Tensor,
    mesh: DeviceMesh | None,
    batch: Batch,
    strategy: str,
    seq_len: int | None,
) -> Place:
    """Return the place of local shards; DTensors have it themselves."""
    place, _ = placed_shards(query, key, mesh, batch, strategy)
    if place.group_name is None:
        if seq_len is not None:
            raise ValueError("seq_len is for local shards, and query is a DTensor; leave it out")
        if torch.compiler.is_compiling():
            tag_compiled()  # other calls do this when they look up the group
    elif seq_len is not None and batch.key_runs is None:
        length = as_count("seq_len", seq_len)
        place = place._replace(seq_len=length, key_seq_len=length)
    return place


def _local(call: Call, query: Any, key: Any, ring: Ring) -> tuple[Any, ...]:
    """Return the options on local tensors; the strategy stays that of the call."""
    local = local_call(call, query, key, key, ring)
    return flatten(local._replace(place=local.place._replace(strategy=call.place.strategy)))


def _select(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    query, key, weights, *choice = args[:6]
    call = unflatten(args[6:])
    ring = ring_of_call(query, key, key, call)
    if Shard(HEADS) in ring.placements:
        raise ValueError(
            "an indexer sums over its heads, so they must be Replicate, got query "
            f"({placements_text(ring.placements)})"
        )
    tensors = [local_of(x, ring) for x in (query, key, weights)]
    found = select_op(*tensors, *choice, *_local(call, query, key, ring))
    batch, heads, num_queries, _ = query.shape
    shape = batch, heads if weights is None else 1, num_queries, found.shape[3]
    return wrap(found, shape, ring)


def _attend(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    query, rows, selected, *how = args[:6]
    call = unflatten(args[6:])
    ring = ring_of_call(query, rows, rows, call)
    local = [local_of(query, ring), local_of(rows, ring), _selected(selected, ring)]
    out, lse = selected_op(*local, *how, *_local(call, query, rows, ring))
    shape = tuple(query.shape[:3])
    return wrap(out, (*shape, how[1] - how[0]), ring), wrap(lse, shape, ring)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    grad_out, grad_lse, query, rows, selected, *how = args[:8]
    out, lse, call = args[8], args[9], unflatten(args[10:])
    ring = ring_of_call(query, rows, rows, call)
    grads = [local_of(x, ring) for x in (grad_out, grad_lse)]
    local = [local_of(query, ring), local_of(rows, ring), _selected(selected, ring)]
    saved = local_of(out, ring), local_of(lse, ring)
    options = _local(call, query, rows, ring)
    grad_query, grad_rows, of_sinks = selected_backward_op(*grads, *local, *how, *saved, *options)
    sinks: Any = call.scores.sinks
    if isinstance(sinks, DTensor):
        of_sinks = wrap(of_sinks, tuple(sinks.shape), ring, _of_sinks(sinks, ring))
    wrapped = [
        wrap(grad, tuple(x.shape), ring) for grad, x in ((grad_query, query), (grad_rows, rows))
    ]
    return *wrapped, of_sinks


def _of_sinks(sinks: DTensor, ring: Ring) -> Placements:
    """Return the placements of the sinks' gradient: a rank sums over its own tokens and heads."""
    return tuple(
        Partial() if where in (Shard(0), Shard(SEQUENCE)) else of_sinks
        for where, of_sinks in zip(ring.placements, sinks.placements, strict=True)
    )


def _selected(selected: Any, ring: Ring) -> Any:
    """Return the local lists; one list for all heads is the same wherever heads are sharded."""
    if not isinstance(selected, DTensor):
        raise TypeError(
            f"selected must be a DTensor as query is, got {type(selected).__name__}; select_keys "
            "returns one for DTensors"
        )
    places = ring.placements
    if selected.shape[1] == 1:
        places = tuple(Replicate() if where == Shard(HEADS) else where for where in places)
    if tuple(selected.placements) != places:
        selected = selected.redistribute(ring.mesh, places)
    return selected._local_tensor


handlers.update({select_op: _select, selected_op: _attend, selected_backward_op: _backward})
