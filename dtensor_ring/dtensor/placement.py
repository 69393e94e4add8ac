"""Finds the ring of DTensors: the mesh axis that their sequence is sharded over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dtensor_ring.compute.memory import Order, order_of, strides
from dtensor_ring.dtensor.annotation import (
    annotation_of,
    config_of_call,
    group_of,
    layout_of,
    tag_compiled,
    tokens_of,
)
from dtensor_ring.dtensor.axis_config import AxisConfig
from dtensor_ring.dtensor.sequence_tensor import known
from dtensor_ring.ops.checks import CALLER

BATCH, HEADS, SEQUENCE = 0, 1, 2

# The largest number of specs that are cached on a mesh; a model has a few.
MAX_SPECS = 256

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Ring:
    """The mesh axis that the sequence is sharded over, and how attention over it runs."""

    mesh: DeviceMesh
    placements: Placements
    group: ProcessGroup
    config: AxisConfig


def ring_of(query: Any, key: Any, value: Any, with_runs: bool) -> Ring:
    """Read the ring off the placements of query, key and value.

    Args:
        query: a DTensor `(B, N, S, H)`; key and value have its placements.
        key: `(B, Nkv, S, H)`.
        value: `(B, Nkv, S, Hv)`.
        with_runs: whether the call has the runs of its batch.

    Raises:
        TypeError: if some are DTensors and others are not.
        ValueError: if their placements are not equal, or not possible in a ring.
    """
    check_kinds(query, key, value)
    tensors, spec = (query, key, value), query._spec
    for x in (key._spec, value._spec):
        # Fast path for identical objects: comparing meshes costs more than all other checks.
        is_same = x.mesh is spec.mesh and x.placements is spec.placements
        if not is_same and (x.mesh != spec.mesh or x.placements != spec.placements):
            raise ValueError(
                "query, key and value must be sharded alike on one mesh, got "
                f"{_by_name(describe, tensors)}; "
                "redistribute them to the same placements"
            )
    axis = _checked_axis(tensors, spec)
    group = group_of(spec.mesh, axis)
    return _ring(query, spec, group, config_of_call(group, with_runs, spec.mesh))


def dtensor_of(x: Any) -> DTensor | None:
    """Return `x` if it is a DTensor, or the DTensor inside the wrappers of `torch.func`."""
    if isinstance(x, DTensor):
        return x
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x if isinstance(x, DTensor) else None


def strategy_of(x: DTensor) -> str | None:
    """Return the strategy of the axis of a DTensor's sequence, `None` if it is not configured.

    Raises:
        ValueError: if it is not on one axis.
    """
    spec = x._spec
    axis, _ = _axes(spec.placements)
    if not spec.mesh._is_current_rank_part_of_mesh():  # the op raises
        return None
    tokens = tokens_of(spec.mesh)
    if tokens is not None:
        return tokens.config.strategy
    config = annotation_of(group_of(spec.mesh, axis)).config
    return None if config is None else config.strategy


def ring_of_keys(query: Any, key: Any, value: Any, with_runs: bool) -> Ring:
    """Read the ring off the placements of keys and values; the query is `Replicate` over it.

    Args:
        query: a DTensor `(B, N, M, H)`, on other axes placed as key and value.
        key: `(B, Nkv, S, H)`.
        value: `(B, Nkv, S, Hv)`.
        with_runs: whether the call says which positions each rank holds.

    Raises:
        TypeError: if some are DTensors and others are not.
        ValueError: if they have other placements.
    """
    check_kinds(query, key, value)
    tensors, spec = (query, key, value), key._spec
    axis = _checked_axis(tensors, spec)
    if any(
        x.device_mesh != spec.mesh or tuple(x.placements) != expected
        for x, expected in ((value, tuple(spec.placements)), (query, without(spec.placements)))
    ):
        raise ValueError(
            "key and value must be sharded alike on one mesh, and query as they are, but Replicate "
            f"over the axis of the sequence, got {_by_name(describe, tensors)}"
        )
    group = group_of(spec.mesh, axis)
    return _ring(query, spec, group, _config_of_keys(spec.mesh, group, with_runs))


def _ring(query: Any, spec: Any, group: ProcessGroup, config: AxisConfig) -> Ring:
    """Make the ring of a call, whose record gets the placements; a compiler may trace this."""
    if isinstance(query._local_tensor, FakeTensor):
        tag_compiled()
    if CALLER.frame is not None:  # otherwise a compiler traces, or this is a backward call
        CALLER.placements = placements_text(spec.placements)  # `called_from` removes it
    return Ring(spec.mesh, spec.placements, group, config)


def on_annotated_axis(x: Any, dim: int) -> bool:
    """Return whether `x` is a DTensor, sharded in `dim` over an axis that has a layout."""
    dtensor = dtensor_of(x)
    if dtensor is None or not dtensor.device_mesh._is_current_rank_part_of_mesh():
        return False
    mesh = dtensor.device_mesh
    return any(
        where == Shard(dim) and layout_of(mesh, axis) is not None
        for axis, where in enumerate(dtensor.placements)
    )


@lru_cache(maxsize=256)
def placements_text(placements: Placements) -> str:
    """Describe placements briefly, for a call record.

    >>> placements_text((Shard(0), Shard(2), Replicate()))
    'S(0), S(2), R'
    """
    return ", ".join(map(str, placements))


def without(placements: Placements) -> Placements:
    """Return the placements with `Replicate` in place of the sharded sequence."""
    return tuple(Replicate() if where == Shard(SEQUENCE) else where for where in placements)


def _config_of_keys(mesh: DeviceMesh, group: ProcessGroup, with_runs: bool) -> AxisConfig:
    """Return the configuration for a decode call; runs of keys are allowed with any layout.

    Raises:
        ValueError: if there are no runs, but the layout belongs to a batch.
    """
    if with_runs:
        tokens = tokens_of(mesh)
        return annotation_of(group).config_or_default if tokens is None else tokens.config
    return config_of_call(group, False, mesh)


def check_kinds(query: Any, key: Any, value: Any) -> None:
    """Refuse a mix of DTensors and plain tensors."""
    if not (isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor)):
        kinds = _by_name(lambda x: type(x).__name__, (query, key, value))
        raise TypeError(f"query, key and value must all be DTensors or none, got {kinds}")


def _checked_axis(tensors: tuple[DTensor, DTensor, DTensor], spec: DTensorSpec) -> int:
    """Return the axis of the sequence; raise if attention over it is not possible here."""
    axis, by_head = _axes(spec.placements)
    if by_head:
        _check_heads(tensors, prod(map(spec.mesh.size, by_head)))
    if not spec.mesh._is_current_rank_part_of_mesh():
        raise ValueError(f"this rank is not part of {spec.mesh}: it has no ring there")
    return axis


@lru_cache(maxsize=256)
def _axes(placements: Placements) -> tuple[int, tuple[int, ...]]:
    """Return the mesh axis of the sequence, and the axes of the heads."""
    axes = [axis for axis, where in enumerate(placements) if where == Shard(SEQUENCE)]
    if len(axes) != 1:
        over = "no axis" if not axes else f"{len(axes)} axes"
        raise ValueError(
            f"a ring needs the sequence, Shard({SEQUENCE}), on exactly one mesh axis, it is on "
            f"{over}: query, key and value {placements}; see shard_sequence"
        )
    for axis, where in enumerate(placements):
        if where not in (Shard(BATCH), Shard(HEADS), Shard(SEQUENCE), Replicate()):
            raise ValueError(
                "beside the sequence, a ring takes Shard(0) (batch), Shard(1) (heads) and "
                f"Replicate, got {where} on mesh axis {axis}: query, key and value {placements}"
            )
    return axes[0], tuple(axis for axis, where in enumerate(placements) if where == Shard(HEADS))


def _by_name(say: Callable[[Any], str], tensors: tuple[Any, Any, Any]) -> str:
    """Describe each of the three tensors by name, for an error."""
    names = "query", "key", "value"
    return ", ".join(f"{name} {say(x)}" for name, x in zip(names, tensors, strict=True))


def _check_heads(tensors: tuple[DTensor, DTensor, DTensor], ways: int) -> None:
    query, key, value = tensors
    heads = {"query": query.shape[HEADS], "key": key.shape[HEADS], "value": value.shape[HEADS]}
    if any(count % ways for count in heads.values()):
        raise ValueError(
            f"heads can be sharded {ways} ways only if that divides the query and the key/value "
            f"heads, got {heads}; shard fewer ways or replicate"
        )


def describe(x: DTensor) -> str:
    """Describe the placements of a DTensor, for an error."""
    return f"{tuple(x.placements)} on {x.device_mesh}"


def wrap(
    local: Tensor, shape: tuple[int, ...], ring: Ring, placements: Placements | None = None
) -> DTensor:
    """Wrap a dense local tensor in a DTensor of a global shape."""
    return wrap_on(ring.mesh, local, shape, placements or ring.placements)


def wrap_on(
    mesh: DeviceMesh, local: Tensor, shape: tuple[int, ...], placements: Placements
) -> DTensor:
    """Wrap a dense local tensor in a DTensor of a global shape on a mesh."""
    # A compiler's tensors have other types, and each of them needs its own spec.
    make = _known_spec if type(local) is Tensor else _spec
    spec = make(mesh, placements, shape, order_of(local), local.dtype)
    return known(DTensor._op_dispatcher.wrap(local, spec))


def _spec(
    mesh: DeviceMesh,
    placements: Placements,
    shape: tuple[int, ...],
    order: Order,
    dtype: torch.dtype,
) -> DTensorSpec:
    """Make the spec of a DTensor."""
    meta = TensorMeta(torch.Size(shape), strides(shape, order), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def _known_spec(
    mesh: DeviceMesh,
    placements: Placements,
    shape: tuple[int, ...],
    order: Order,
    dtype: torch.dtype,
) -> DTensorSpec:
    """Return a spec that is made once per mesh: DTensor shares the specs of its results, too."""
    # Specs are cached on the mesh itself. Meshes compare equal even if their process group was
    # destroyed and created again, so a table keyed by mesh would return specs of an old mesh.
    known = mesh.__dict__.setdefault("_dtensor_ring_specs", {})
    key = placements, shape, order, dtype
    if key not in known:
        if len(known) >= MAX_SPECS:
            known.clear()
        known[key] = _spec(mesh, placements, shape, order, dtype)
    return known[key]


def local_of(x: Any, ring: Ring) -> Any:
    """Return the local tensor of a DTensor with the ring's placements, other values unchanged."""
    if not isinstance(x, DTensor):
        return x
    if x._spec.placements is not ring.placements and tuple(x.placements) != ring.placements:
        x = x.redistribute(ring.mesh, ring.placements)
    return x._local_tensor
