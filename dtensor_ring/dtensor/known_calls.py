"""Calls of `ring_attention` that were made before, bound.

A model makes the same call in each layer and step, without other tensors than query, key and value.
Its arguments were checked, and the bound call follows from them and from the shapes, until the axis
gets another configuration, see Note [Bound calls].
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.all_to_all.ulysses import is_exchanged
from dtensor_ring.dtensor.annotation import annotation_of, axis_group, groups_of, registered
from dtensor_ring.ops.bound import BoundCall, bound_call
from dtensor_ring.ops.options import Call, flatten
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.strategy import AUTO

# The most calls of an axis that are kept; a model has a few.
MAX_KNOWN = 256

# Calls of decoding without a mesh, where this rank has all keys, see `keep`.
_ALONE: dict[Any, Any] = {}

# Types of options that do not change.
_CONSTANTS = type(None), bool, int, float, str, Mask

# Mask, scale, softcap, kernel and strategy as the caller gave them.
Asked = tuple[Any, ...]


def known_call(
    query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh | None, asked: Asked
) -> BoundCall | None:
    """Return the bound call of one that was made before, `None` for others.

    Args:
        query: this rank's queries; as all tensors here, maybe no tensor at all.
        key: this rank's keys.
        value: this rank's values.
        mesh: the mesh of the call.
        asked: the options of the call.
    """
    # Dynamo must not trace what follows.
    if mesh is None or torch.compiler.is_compiling() or not _are_plain(query, key, value):
        return None
    kept = known_calls_of(mesh)
    if kept is None:
        return None
    group_name, calls = kept
    try:
        return calls.get(_key(group_name, query, key, value, asked))
    except TypeError:  # no option of a wrong type is known
        return None


def known_calls_of(mesh: DeviceMesh | None) -> tuple[str | None, dict[Any, Any]] | None:
    """Return the group's name and the known calls of a 1-D mesh, or of no mesh.

    Without such calls, or if its group is gone, return `None`.
    """
    if mesh is None:
        return None, _ALONE
    kept = groups_of(mesh) if type(mesh) is DeviceMesh else None
    if kept is None or kept.calls is None:
        return None
    name, known = kept[0]
    group = registered(name)
    return None if group is None or group is not known() else (name, kept.calls)


def keep_call(
    call: Call, query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh | None, asked: Asked
) -> None:
    """Keep a call that was made, if it is a ring of the tensors as they are."""
    if mesh is None or torch.compiler.is_compiling() or not _are_plain(query, key, value):
        return
    if call.place.strategy == AUTO or is_exchanged(call):
        return
    group_name: Any = call.place.group_name
    found = bound_call(flatten(call), query, key, value)
    keep(mesh, _key(group_name, query, key, value, asked), found)


def keep(mesh: DeviceMesh | None, key: tuple[Any, ...], found: Any) -> None:
    """Keep what was found for a call over the axis of a mesh, or without a mesh.

    The last item of the key are the options as the caller gave them. If one of them may change, as
    the number in a tensor may, nothing is kept.
    """
    if not all(type(x) in _CONSTANTS for x in key[-1]):
        return
    calls = _ALONE
    if mesh is not None:
        group, kept = axis_group(mesh), groups_of(mesh)
        calls = kept.calls = annotation_of(group).calls
        kept[0] = group.group_name, ref(group)
    if len(calls) >= MAX_KNOWN:
        calls.clear()
    calls[key] = found


def _are_plain(query: Any, key: Any, value: Any) -> bool:
    """Return whether these are no subclasses, whose shapes may be symbols."""
    return type(query) is type(key) is type(value) is Tensor


def _key(
    group_name: str | None, query: Tensor, key: Tensor, value: Tensor, asked: Asked
) -> tuple[Any, ...]:
    """Return what was checked of a call. Tensors of other memory layouts are not plain."""
    return (
        group_name,
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        asked,
    )
