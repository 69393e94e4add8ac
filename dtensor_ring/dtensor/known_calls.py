"""Calls of `ring_attention` that were made before, bound.

A model makes the same call in each layer and step, without other tensors than query, key and value.
Its arguments were checked, and the bound call follows from them and from the shapes, until the axis
gets another configuration, see Note [Bound calls].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.all_to_all.ulysses import is_exchanged
from dtensor_ring.dtensor.annotation import annotation_of, axis_group
from dtensor_ring.ops.bound import BoundCall, bound_call
from dtensor_ring.ops.options import Call, flatten
from dtensor_ring.planning.strategy import AUTO

# The most calls of an axis that are kept; a model has a few.
MAX_KNOWN = 256

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
    if mesh is None or not _is_eager(query, key, value):
        return None
    group = axis_group(mesh)
    try:
        return annotation_of(group).calls.get(_key(group, query, key, value, asked))
    except TypeError:  # no option of a wrong type is known
        return None


def keep_call(
    call: Call, query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh | None, asked: Asked
) -> None:
    """Keep a call that was made, if it is a ring of the tensors as they are."""
    if mesh is None or not _is_eager(query, key, value):
        return
    if call.place.strategy == AUTO or is_exchanged(call):
        return
    group = axis_group(mesh)
    calls = annotation_of(group).calls
    if len(calls) >= MAX_KNOWN:
        calls.clear()
    found = bound_call(flatten(call), query, key, value)
    calls[_key(group, query, key, value, asked)] = found


def _is_eager(*tensors: Any) -> bool:
    # Dynamo must not trace this, and shapes of other tensors may be symbols.
    return not torch.compiler.is_compiling() and all(type(x) is Tensor for x in tensors)


def _key(
    group: ProcessGroup, query: Tensor, key: Tensor, value: Tensor, asked: Asked
) -> tuple[Any, ...]:
    """Return what was checked of a call. Tensors of other memory layouts are not plain."""
    shapes, dtypes = (query.shape, key.shape, value.shape), (query.dtype, key.dtype, value.dtype)
    devices = query.device, key.device, value.device
    return group.group_name, *shapes, *dtypes, *devices, *asked
