"""Ring attention on DTensors: what the ops do with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dtensor_ring.dtensor.placement import (
    BATCH,
    HEADS,
    SEQUENCE,
    Ring,
    describe,
    local_of,
    ring_of,
    wrap,
)
from dtensor_ring.ops.boundaries import on_host
from dtensor_ring.ops.options import LEAVES, Batch, Call, flatten, unflatten
from dtensor_ring.ops.schema import ring_backward_op, ring_op
from dtensor_ring.planning.run import shard_length


def ring_forward_dtensor(
    query: DTensor, key: DTensor, value: DTensor, call: Call
) -> tuple[DTensor, DTensor]:
    """The ring op on DTensors, whose placements and axis say the call's place."""
    ring = ring_of(query, key, value, call.batch.runs is not None)
    out, lse = ring_op(
        *(local_of(x, ring) for x in (query, key, value)),
        *flatten(_local_call(call, query, key, ring)),
    )
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
    """The ring's backward op on DTensors."""
    ring, sinks = ring_of(query, key, value, call.batch.runs is not None), call.scores.sinks
    *grads, grad_sinks = ring_backward_op(
        *(local_of(x, ring) for x in (grad_out, grad_lse, query, key, value, out, lse)),
        *flatten(_local_call(call, query, key, ring)),
    )
    grad_query, grad_key, grad_value = (
        wrap(grad, tuple(x.shape), ring) for grad, x in zip(grads, (query, key, value), strict=True)
    )
    if isinstance(sinks, DTensor):
        # Each rank has summed over its own tokens only.
        places = tuple(
            Partial() if where in (Shard(BATCH), Shard(SEQUENCE)) else of_sinks
            for where, of_sinks in zip(ring.placements, sinks.placements, strict=True)
        )
        grad_sinks = wrap(grad_sinks, tuple(sinks.shape), ring, places)
    return grad_query, grad_key, grad_value, grad_sinks


def _local_call(call: Call, query: DTensor, key: DTensor, ring: Ring) -> Call:
    """The call on this rank's tensors: its rows of the boundaries, and the sinks of its heads."""
    batch, scores, config = call.batch, call.scores, ring.config
    bounds = _local_rows("cu_seqlens", batch.cu_seqlens, query, ring)
    key_bounds = _local_rows("key_cu_seqlens", batch.key_cu_seqlens, query, ring)
    slices = _local_rows("slices", batch.slices, query, ring, 3)
    lengths = query.shape[SEQUENCE], key.shape[SEQUENCE]
    if scores.sinks is not None or (scores.kernel is None and config.kernel is not None):
        sinks, kernel = _local_sinks(scores.sinks, ring), scores.kernel or config.kernel
        scores = scores._replace(sinks=sinks, kernel=kernel)
    return Call(
        Batch(bounds, key_bounds, batch.runs, slices),
        scores,
        config.place(ring.group.group_name, *lengths),
    )


def _local_rows(name: str, given: Any, query: DTensor, ring: Ring, ndim: int = 2) -> Any:
    """This rank's batch rows of a tensor, which has them if it has `ndim` dims."""
    if given is None or given.ndim != ndim:
        return given
    if len(given) != query.shape[BATCH]:
        one, rows = ("(D+1,)", "D+1") if ndim == 2 else ("(N, 6)", "N, 6")
        raise ValueError(
            f"{name} must be that of the whole batch, shape {one} or "
            f"({query.shape[BATCH]}, {rows}), got {tuple(given.shape)}"
        )
    start, length = _batch_rows(query, ring)
    # The same object where it can be: what was made of it is found by its address.
    if (start, length) == (0, len(given)):
        return given
    return on_host(given)[start : start + length]


def _local_sinks(sinks: Any, ring: Ring) -> Any:
    if isinstance(sinks, DTensor):
        expected = tuple(
            Shard(0) if where == Shard(HEADS) else Replicate() for where in ring.placements
        )
        if sinks.device_mesh != ring.mesh or tuple(sinks.placements) != expected:
            raise ValueError(
                f"sinks must be {expected} on {ring.mesh}, as the query's heads are, "
                f"got {describe(sinks)}"
            )
        return sinks._local_tensor
    return sinks


def _batch_rows(query: DTensor, ring: Ring) -> tuple[int, int]:
    """First row and number of rows of the batch that this rank holds."""
    # Axes shard the batch one after the other, each what the one before left.
    start, length = 0, query.shape[BATCH]
    coordinate = ring.mesh.get_coordinate()
    assert coordinate is not None, "this rank has a ring in the mesh"
    for axis, where in enumerate(ring.placements):
        if where == Shard(BATCH):
            rank, size = coordinate[axis], ring.mesh.size(axis)
            start += sum(shard_length(other, size, length) for other in range(rank))
            length = shard_length(rank, size, length)
    return start, length


def arguments_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    names, defaults = _signature(op)
    return defaults | dict(zip(names, args, strict=False)) | kwargs


@cache
def _signature(op: OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = op._schema.arguments
    return tuple(x.name for x in arguments), {x.name: x.default_value for x in arguments}


def _handle(run: Callable[..., Any]) -> Callable[..., Any]:
    """A handler for an op of ours."""

    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(*args[: -len(LEAVES)], unflatten(args[-len(LEAVES) :]))

    return handle


handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
handlers.update(
    {ring_op: _handle(ring_forward_dtensor), ring_backward_op: _handle(ring_backward_dtensor)}
)
