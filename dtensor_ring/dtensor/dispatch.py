"""Runs the ops on DTensors: reads the call's place off them and wraps the local results."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtensor_ring.all_to_all.ulysses import is_exchanged, ulysses_attention, ulysses_backward
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.compute.memory import order_of, strides
from dtensor_ring.dtensor.annotation import axis_mesh
from dtensor_ring.dtensor.choice import chosen
from dtensor_ring.dtensor.placement import (
    BATCH,
    HEADS,
    SEQUENCE,
    Placements,
    Ring,
    describe,
    local_of,
    ring_of,
    wrap,
)
from dtensor_ring.dtensor.sequence_tensor import known
from dtensor_ring.ops.boundaries import on_host
from dtensor_ring.ops.options import LEAVES, Call, Place, flatten, unflatten
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from dtensor_ring.planning.layout import shard_length


def ring_of_call(query: DTensor, key: DTensor, value: DTensor, call: Call) -> Ring:
    """Return the ring of a call."""
    if call.batch.key_runs is not None:
        raise ValueError(
            "key_runs are for local shards, whose lengths they say, and query is a DTensor; pass "
            "the tensors of this rank and mesh="
        )
    return ring_of(query, key, value, call.batch.runs is not None)


def ring_forward_dtensor(
    query: DTensor, key: DTensor, value: DTensor, call: Call
) -> tuple[DTensor, DTensor]:
    """Run the ring op on DTensors, whose placements and axis give the call's place."""
    ring = ring_of_call(query, key, value, call)
    own_query, own_key, own_value = [local_of(x, ring) for x in (query, key, value)]
    local = local_call(call, query, key, value, ring)
    results: Any
    if is_exchanged(local):
        # Leaves require gradients under `no_grad`, too; then nothing keeps lse and what it holds.
        inputs = query, key, value, call.scores.sinks
        keep = any(x is not None and x.requires_grad for x in inputs)
        results = ulysses_attention(own_query, own_key, own_value, local, keep=keep)
    else:
        results = ring_op(own_query, own_key, own_value, *flatten(local))
    out, lse = results
    shape = tuple(query.shape[:3])
    return wrap(out, (*shape, value.shape[3]), ring), wrap(lse, shape, ring)


def ring_backward_dtensor(
    grad_out: Any,
    grad_lse: Any,
    query: DTensor,
    key: DTensor,
    value: DTensor,
    out: DTensor,
    lse: DTensor,
    call: Call,
) -> tuple[DTensor, DTensor, DTensor, Any]:
    """Run the ring's backward op on DTensors."""
    ring, sinks = ring_of_call(query, key, value, call), call.scores.sinks
    tensors: list[Any] = [
        local_of(x, ring) for x in (grad_out, grad_lse, query, key, value, out, lse)
    ]
    local = local_call(call, query, key, value, ring)
    if is_exchanged(local):
        *grads, grad_sinks = ulysses_backward(*tensors, call=local)
    else:
        *grads, grad_sinks = ring_backward_op(*tensors, *flatten(local))
    grad_query, grad_key, grad_value = (
        wrap(grad, tuple(x.shape), ring) for grad, x in zip(grads, (query, key, value), strict=True)
    )
    if isinstance(sinks, DTensor):
        places = placements_of_sinks_gradient(sinks, ring)
        grad_sinks = wrap(grad_sinks, tuple(sinks.shape), ring, places)
    return grad_query, grad_key, grad_value, grad_sinks


def placements_of_sinks_gradient(sinks: DTensor, ring: Ring) -> Placements:
    """Return the placements of the gradient: each rank sums over only its own tokens or heads."""
    return tuple(
        Partial() if where in (Shard(BATCH), Shard(SEQUENCE)) else of_sinks
        for where, of_sinks in zip(ring.placements, sinks.placements, strict=True)
    )


def ulysses_dtensors(
    query: DTensor, key: DTensor, value: DTensor, call: Call, with_lse: bool
) -> tuple[DTensor, DTensor | None]:
    """Run attention on DTensors with exchanges that are visible to autograd.

    The ring op on DTensors instead keeps both the own and the exchanged tensors for backward.
    """
    ring = ring_of_call(query, key, value, call)
    local, sinks = local_call(call, query, key, value, ring), call.scores.sinks
    if isinstance(sinks, DTensor):
        own = sinks.to_local(grad_placements=placements_of_sinks_gradient(sinks, ring))
        local = local._replace(scores=local.scores._replace(sinks=own))
    out, lse = ulysses_attention(
        query=query.to_local(),
        key=key.to_local(),
        value=value.to_local(),
        call=local,
        with_lse=with_lse,
    )
    shape = tuple(query.shape[:3])
    return (
        _from_local(out, (*shape, value.shape[3]), ring),
        None if lse is None else _from_local(lse, shape, ring),
    )


def _from_local(local: Tensor, shape: tuple[int, ...], ring: Ring) -> DTensor:
    """Wrap a local tensor like `wrap`, but differentiably."""
    # The strides of a DTensor are those of the whole tensor, in the order of its shards.
    stride = strides(shape, order_of(local))
    made = DTensor.from_local(
        local, ring.mesh, ring.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return known(made)


def local_call(call: Call, query: DTensor, key: DTensor, value: DTensor, ring: Ring) -> Call:
    """Return the call on local tensors, with this rank's rows of boundaries and its own sinks."""
    batch, config = call.batch, ring.config
    bounds = local_rows("cu_seqlens", batch.cu_seqlens, query, ring)
    key_bounds = local_rows("key_cu_seqlens", batch.key_cu_seqlens, query, ring)
    slices = local_rows("slices", batch.slices, query, ring, 3)
    place = config.place(
        ring.group.group_name, query.shape[SEQUENCE], key.shape[SEQUENCE], call.place.strategy
    )
    local = Call(
        batch._replace(cu_seqlens=bounds, key_cu_seqlens=key_bounds, slices=slices),
        local_scores(call.scores, query, ring),
        # A strategy that was chosen before keeps the machine by which it was.
        place if call.place.machine is None else place._replace(machine=call.place.machine),
    )
    return chosen(local, query._local_tensor, value._local_tensor)


def chosen_on_dtensors(query: DTensor, key: DTensor, value: DTensor, call: Call) -> Call:
    """Return a call on DTensors with a strategy in place of "auto"."""
    local = local_call(call, query, key, value, ring_of_call(query, key, value, call))
    of_call = Place(strategy=local.place.strategy, machine=local.place.machine)
    return Call(call.batch, call.scores, of_call)


def local_scores(scores: Scores, query: DTensor, ring: Ring) -> Scores:
    """Return the scores with the sinks of this rank's heads and the axis's kernel."""
    of_axis = ring.config.kernel
    if scores.dropout_p:
        first = tuple(_own_span(query, ring, dim)[0] for dim in (BATCH, HEADS))
        scores = scores._replace(first=first)
    if scores.sinks is None and (scores.kernel is not None or of_axis is None):
        return scores
    return scores._replace(sinks=_local_sinks(scores.sinks, ring), kernel=scores.kernel or of_axis)


def local_rows(name: str, given: Any, query: DTensor, ring: Ring, ndim: int = 2) -> Any:
    """Return this rank's batch rows of a tensor; it has a batch dim if it has `ndim` dims."""
    if given is None or given.ndim != ndim:
        return given
    if len(given) != query.shape[BATCH]:
        one, rows = {1: ("(1,)", ""), 2: ("(D+1,)", " D+1"), 3: ("(N, 6)", " N, 6")}[ndim]
        raise ValueError(
            f"{name} must be that of the whole batch, shape {one} or "
            f"({query.shape[BATCH]},{rows}), got {tuple(given.shape)}"
        )
    start, length = _own_span(query, ring, BATCH)
    # Return the same object if possible: the cache of converted tensors looks it up by address.
    if (start, length) == (0, len(given)):
        return given
    return on_host(given)[start : start + length]


def _local_sinks(sinks: Any, ring: Ring) -> Any:
    if isinstance(sinks, DTensor):
        expected = tuple(
            Shard(0) if where == Shard(HEADS) else Replicate() for where in ring.placements
        )
        on = axis_mesh(sinks.device_mesh)
        if on != axis_mesh(ring.mesh) or tuple(sinks.placements) != expected:
            raise ValueError(
                f"sinks must be {expected} on {ring.mesh}, as the query's heads are, "
                f"got {describe(sinks)}"
            )
        return sinks._local_tensor
    return sinks


def _own_span(query: DTensor, ring: Ring, dim: int) -> tuple[int, int]:
    """Return the first batch row or head that this rank holds, and their number."""
    # Several axes may shard the batch, each the shard of the axis before it.
    start, length = 0, query.shape[dim]
    if ring.mesh.ndim == 1:  # the axis of the sequence
        return start, length
    coordinate = ring.mesh.get_coordinate()
    assert coordinate is not None, "this rank has a ring in the mesh"
    for axis, where in enumerate(ring.placements):
        if where == Shard(dim):
            rank, size = coordinate[axis], ring.mesh.size(axis)
            start += sum(shard_length(other, size, length) for other in range(rank))
            length = shard_length(rank, size, length)
    return start, length


def arguments_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, including defaults."""
    names, defaults = _signature(op)
    return defaults | dict(zip(names, args, strict=False)) | kwargs


@cache
def _signature(op: OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = op._schema.arguments
    return tuple(x.name for x in arguments), {x.name: x.default_value for x in arguments}


def handler_of(
    run: Callable[..., Any],
    num_leaves: int = len(LEAVES),
    build: Callable[[tuple[Any, ...]], Any] = unflatten,
) -> Callable[..., Any]:
    """Return a handler for one of our ops, whose options are its last arguments."""

    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(*args[:-num_leaves], build(args[-num_leaves:]))

    return handle


handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
handlers.update(
    {
        ring_op: handler_of(ring_forward_dtensor),
        ring_backward_op: handler_of(ring_backward_dtensor),
    }
)
