"""The ring of DTensors: the mesh axis that their sequence is sharded over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dtensor_ring.compute.memory import Order, order_of, strides
from dtensor_ring.dtensor.annotation import (
    annotation_of,
    config_of_call,
    group_of,
    layout_of,
    tag_compiled,
)
from dtensor_ring.dtensor.axis_config import AxisConfig

BATCH, HEADS, SEQUENCE = 0, 1, 2

MAX_SPECS = 256
"""Specs that a mesh keeps; a model has a few."""

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
        with_runs: whether the call brings the runs of its batch.

    Raises:
        TypeError: if some are DTensors and others are not.
        ValueError: if they are not sharded alike, as a ring needs it.
    """
    check_kinds(query, key, value)
    tensors, spec = (query, key, value), query._spec
    for x in (key._spec, value._spec):
        # Most often they are the same objects: comparing meshes costs more than all the rest.
        is_same = x.mesh is spec.mesh and x.placements is spec.placements
        if not is_same and (x.mesh != spec.mesh or x.placements != spec.placements):
            raise ValueError(
                "query, key and value must be sharded alike on one mesh, got "
                f"{_by_name(describe, tensors)}; "
                "redistribute them to the same placements"
            )
    axis = _checked_axis(tensors, spec)
    group = group_of(spec.mesh, axis)
    return _ring(query, spec, group, config_of_call(group, with_runs))


def dtensor_of(x: Any) -> DTensor | None:
    """The DTensor that it is, or that transforms of `torch.func` have made it of."""
    if isinstance(x, DTensor):
        return x
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x if isinstance(x, DTensor) else None


def strategy_of(x: DTensor) -> str | None:
    """The strategy of the axis that a DTensor's sequence is on, `None` if nobody configured it.

    Raises:
        ValueError: if it is not on one axis.
    """
    spec = x._spec
    axis, _ = _axes(spec.placements)
    if spec.mesh.get_coordinate() is None:  # the op says what is wrong
        return None
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
        ValueError: if they are not placed so.
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
    return _ring(query, spec, group, _config_of_keys(group, with_runs))


def _ring(query: Any, spec: Any, group: ProcessGroup, config: AxisConfig) -> Ring:
    """The ring of a call, which a compiler may trace."""
    if isinstance(query._local_tensor, FakeTensor):
        tag_compiled()
    return Ring(spec.mesh, spec.placements, group, config)


def on_annotated_axis(x: Any, dim: int) -> bool:
    """Whether `x` is a DTensor, sharded in that dimension over an axis that has a layout."""
    dtensor = dtensor_of(x)
    if dtensor is None or dtensor.device_mesh.get_coordinate() is None:
        return False
    mesh = dtensor.device_mesh
    return any(
        where == Shard(dim) and layout_of(mesh, axis) is not None
        for axis, where in enumerate(dtensor.placements)
    )


def without(placements: Placements) -> Placements:
    """Placements of a tensor that is not sharded along the sequence, and else as that is."""
    return tuple(Replicate() if where == Shard(SEQUENCE) else where for where in placements)


def _config_of_keys(group: ProcessGroup, with_runs: bool) -> AxisConfig:
    """The configuration for a call over the axis; runs of keys may lie in any way.

    Raises:
        ValueError: if there are no runs, and the layout belongs to a batch.
    """
    if with_runs:
        return annotation_of(group).config_or_default
    return config_of_call(group, False)


def check_kinds(query: Any, key: Any, value: Any) -> None:
    """Refuse tensors of which some are DTensors, and others are not."""
    if not (isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor)):
        kinds = _by_name(lambda x: type(x).__name__, (query, key, value))
        raise TypeError(f"query, key and value must all be DTensors or none, got {kinds}")


def _checked_axis(tensors: tuple[DTensor, DTensor, DTensor], spec: DTensorSpec) -> int:
    """The axis that the sequence is on, if attention over it is possible and this rank is there."""
    axis, by_head = _axes(spec.placements)
    if by_head:
        _check_heads(tensors, prod(map(spec.mesh.size, by_head)))
    if spec.mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not part of {spec.mesh}: it has no ring there")
    return axis


@lru_cache(maxsize=256)
def _axes(placements: Placements) -> tuple[int, tuple[int, ...]]:
    """The mesh axis that the sequence is on, and those that the heads are on."""
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
    """What there is to say of each tensor, for an error."""
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
    """Where a DTensor is, for an error."""
    return f"{tuple(x.placements)} on {x.device_mesh}"


def wrap(
    local: Tensor, shape: tuple[int, ...], ring: Ring, placements: Placements | None = None
) -> DTensor:
    """A DTensor of that global shape around a dense local tensor."""
    return wrap_on(ring.mesh, local, shape, placements or ring.placements)


def wrap_on(
    mesh: DeviceMesh, local: Tensor, shape: tuple[int, ...], placements: Placements
) -> DTensor:
    """A DTensor of that global shape on a mesh around a dense local tensor."""
    what = placements, shape, order_of(local), local.dtype
    # A compiler, whose tensors are of other types, wants a spec for each tensor.
    spec = _known_spec(mesh, *what) if type(local) is Tensor else _spec(mesh, *what)
    return cast(DTensor, DTensor._op_dispatcher.wrap(local, spec))


def _spec(
    mesh: DeviceMesh,
    placements: Placements,
    shape: tuple[int, ...],
    order: Order,
    dtype: torch.dtype,
) -> DTensorSpec:
    """DTensor's description of a tensor."""
    meta = TensorMeta(torch.Size(shape), strides(shape, order), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def _known_spec(mesh: DeviceMesh, *what: Any) -> DTensorSpec:
    """The same, made once for a mesh: DTensor shares the specs of its own results, too.

    They are kept on the mesh itself. Meshes compare equal across process groups that were destroyed
    and made anew, so a table by mesh would hand out a mesh of the past.
    """
    known = mesh.__dict__.setdefault("_dtensor_ring_specs", {})
    if what not in known:
        if len(known) >= MAX_SPECS:
            known.clear()
        known[what] = _spec(mesh, *what)
    return known[what]


def local_of(x: Any, ring: Ring) -> Any:
    """The local tensor of a DTensor, sharded as the ring is; other values as they are."""
    if not isinstance(x, DTensor):
        return x
    if x._spec.placements is not ring.placements and tuple(x.placements) != ring.placements:
        x = x.redistribute(ring.mesh, ring.placements)
    return x._local_tensor
