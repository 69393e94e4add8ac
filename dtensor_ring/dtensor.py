"""What happens when attention meets DTensors that are sharded along the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dtensor_ring.annotation import axis_layout
from dtensor_ring.layout import shard_length
from dtensor_ring.op import Options, ring_backward_op, ring_op
from dtensor_ring.order import order_of, strides

BATCH, HEADS, SEQUENCE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Ring:
    """The mesh axis that the sequence is sharded over, and how."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    group: ProcessGroup
    layout: str


def ring_of(query: Any, key: Any, value: Any, runs: Tensor | None = None) -> Ring:
    """Read the ring off the placements of query, key and value.

    Its layout is that of the axis, unless the runs are given.

    Raises:
        TypeError: if some are DTensors and others are not.
        ValueError: if they are not sharded alike, as a ring needs it.
    """
    tensors = {"query": query, "key": key, "value": value}
    kinds = ", ".join(f"{name} {type(x).__name__}" for name, x in tensors.items())
    if not all(isinstance(x, DTensor) for x in tensors.values()):
        raise TypeError(f"query, key and value must all be DTensors or none, got {kinds}")
    found = ", ".join(f"{name} {_describe(x)}" for name, x in tensors.items())
    if any(
        x.device_mesh != query.device_mesh or x.placements != query.placements for x in (key, value)
    ):
        raise ValueError(
            f"query, key and value must be sharded alike on one mesh, got {found}; "
            "redistribute them to the same placements"
        )
    axes = [axis for axis, where in enumerate(query.placements) if where == Shard(SEQUENCE)]
    if len(axes) != 1:
        over = "no axis" if not axes else f"{len(axes)} axes"
        raise ValueError(
            f"a ring needs the sequence, Shard({SEQUENCE}), on exactly one mesh axis, it is on "
            f"{over}: {found}; see shard_sequence"
        )
    for axis, where in enumerate(query.placements):
        if where not in (Shard(BATCH), Shard(HEADS), Shard(SEQUENCE), Replicate()):
            raise ValueError(
                "beside the sequence, a ring takes Shard(0) (batch), Shard(1) (heads) and "
                f"Replicate, got {where} on mesh axis {axis}: {found}"
            )
    _check_heads(tensors)
    if query.device_mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not part of {query.device_mesh}: it has no ring there")
    group = query.device_mesh.get_group(axes[0])
    layout = axis_layout(group, runs is not None)
    return Ring(query.device_mesh, tuple(query.placements), group, layout)


def _check_heads(tensors: dict[str, DTensor]) -> None:
    query = tensors["query"]
    mesh, placements = query.device_mesh, query.placements
    ways = prod(mesh.size(axis) for axis, where in enumerate(placements) if where == Shard(HEADS))
    heads = {name: x.shape[HEADS] for name, x in tensors.items()}
    if any(count % ways for count in heads.values()):
        raise ValueError(
            f"heads can be sharded {ways} ways only if that divides the query and the key/value "
            f"heads, got {heads}; shard fewer ways or replicate"
        )


def _describe(x: DTensor) -> str:
    return f"{tuple(x.placements)} on {x.device_mesh}"


def wrap(
    local: Tensor,
    shape: tuple[int, ...],
    ring: Ring,
    placements: tuple[Placement, ...] | None = None,
) -> DTensor:
    """A DTensor of that global shape around a dense local tensor."""
    meta = TensorMeta(torch.Size(shape), strides(shape, order_of(local)), local.dtype)
    spec = DTensorSpec(ring.mesh, placements or ring.placements, tensor_meta=meta)
    return cast(DTensor, DTensor._op_dispatcher.wrap(local, spec))


def local_of(x: Any, ring: Ring) -> Any:
    """The local tensor of a DTensor, sharded as the ring is; other values as they are."""
    if not isinstance(x, DTensor):
        return x
    if tuple(x.placements) != ring.placements:
        x = x.redistribute(ring.mesh, ring.placements)
    return x._local_tensor


def forward(
    query: DTensor, key: DTensor, value: DTensor, options: Options
) -> tuple[DTensor, DTensor]:
    """The ring op on DTensors, whose placements say what the options leave open."""
    ring = ring_of(query, key, value, options.runs)
    out, lse = ring_op(
        *(local_of(x, ring) for x in (query, key, value)),
        *_local_options(options, query, key, ring),
    )
    shape = tuple(query.shape[:3])
    return wrap(out, (*shape, value.shape[3]), ring), wrap(lse, shape, ring)


def backward(
    grad_out: Any,
    grad_lse: Any,
    query: DTensor,
    key: DTensor,
    value: DTensor,
    out: DTensor,
    lse: DTensor,
    options: Options,
) -> tuple[DTensor, DTensor, DTensor, Any]:
    """The ring's backward op on DTensors."""
    ring, sinks = ring_of(query, key, value, options.runs), options.sinks
    *grads, grad_sinks = ring_backward_op(
        *(local_of(x, ring) for x in (grad_out, grad_lse, query, key, value, out, lse)),
        *_local_options(options, query, key, ring),
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


def _local_options(options: Options, query: DTensor, key: DTensor, ring: Ring) -> Options:
    """What the placements say, this rank's rows of the boundaries, and its heads' sinks."""
    return options._replace(
        cu_seqlens=_local_rows(options.cu_seqlens, query, ring),
        key_cu_seqlens=_local_rows(options.key_cu_seqlens, query, ring),
        sinks=_local_sinks(options.sinks, ring),
        seq_len=query.shape[SEQUENCE],
        key_seq_len=key.shape[SEQUENCE],
        layout=ring.layout,
        group_name=ring.group.group_name,
    )


def _local_rows(cu_seqlens: Any, query: DTensor, ring: Ring) -> Any:
    if cu_seqlens is None or cu_seqlens.ndim != 2:
        return cu_seqlens
    if len(cu_seqlens) != query.shape[BATCH]:
        raise ValueError(
            "boundaries by row are those of the whole batch, shape (D+1,) or "
            f"({query.shape[BATCH]}, D+1), got {tuple(cu_seqlens.shape)}"
        )
    start, length = _batch_rows(query, ring)
    return cu_seqlens[start : start + length]


def _local_sinks(sinks: Any, ring: Ring) -> Any:
    if isinstance(sinks, DTensor):
        expected = tuple(
            Shard(0) if where == Shard(HEADS) else Replicate() for where in ring.placements
        )
        if sinks.device_mesh != ring.mesh or tuple(sinks.placements) != expected:
            raise ValueError(
                f"sinks must be {expected} on {ring.mesh}, as the query's heads are, "
                f"got {_describe(sinks)}"
            )
        return sinks._local_tensor
    return sinks


def _batch_rows(query: DTensor, ring: Ring) -> tuple[int, int]:
    """First row and number of rows of the batch that this rank holds."""
    start, length = 0, query.shape[BATCH]
    for axis, where in enumerate(ring.placements):
        if where == Shard(BATCH):
            rank, size = ring.mesh.get_local_rank(axis), ring.mesh.size(axis)
            start += sum(shard_length(other, size, length) for other in range(rank))
            length = shard_length(rank, size, length)
    return start, length


def bind(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    names = [argument.name for argument in op._schema.arguments]
    bound = {argument.name: argument.default_value for argument in op._schema.arguments}
    return bound | dict(zip(names, args, strict=False)) | kwargs


def _handle(run: Callable[..., Any]) -> Callable[..., Any]:
    """A handler for an op of ours."""

    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        num_options = len(Options._fields)
        return run(*args[:-num_options], Options(*args[-num_options:]))

    return handle


handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
handlers.update({ring_op: _handle(forward), ring_backward_op: _handle(backward)})
