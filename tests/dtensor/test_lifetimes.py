"""What a call is given and returns dies with its last name: it is in no cycle of references.

Else shards would take memory until the next collection, and a process group would outlive
`destroy_process_group`: a thread of gloo that is left then may abort the process at its end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from dtensor_ring import (
    SequenceAxis,
    decode_attention,
    exchange,
    merge_attention,
    relayout,
    ring_attention,
    shard_sequence,
    sum_over_sequence,
    unshard_sequence,
)
from tests.pool import on_ranks


def _merged(query: DTensor, key: DTensor, value: DTensor) -> object:
    part = ring_attention(query, key, value, return_lse=True)
    return merge_attention([part, part])


def _decoded(query: DTensor, key: DTensor, value: DTensor) -> object:
    with torch.no_grad():
        last = query.to_local()[:, :, -1:]
        return decode_attention(last, key.to_local(), value.to_local(), mesh=query.device_mesh)


WAYS: dict[str, Callable[..., object]] = {
    "ring": lambda *shards: ring_attention(*shards, return_lse=True),
    "ulysses": lambda *shards: ring_attention(*shards, strategy="ulysses"),
    "sdpa": lambda *shards: F.scaled_dot_product_attention(*shards, is_causal=True),
    "local": lambda *shards: ring_attention(
        *(x.to_local() for x in shards), mesh=shards[0].device_mesh
    ),
    "merge": _merged,
    "exchange": lambda *shards: exchange([x.to_local() for x in shards], shards[0].device_mesh),
    "relayout": lambda query, *_: relayout(query, query.device_mesh, 2, to="contiguous"),
    "unshard": lambda query, *_: unshard_sequence(query, 2),
    "sum": lambda query, *_: sum_over_sequence(query.to_local(), query.device_mesh),
    "decode": _decoded,
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_nothing_is_kept(way: str) -> None:
    """No memory of a call, forward and backward, is taken after it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    SequenceAxis(mesh, "zigzag")
    gc.collect()
    gc.disable()
    try:
        assert all(storage.expired() for storage in _storages(way, mesh))
    finally:
        gc.enable()


def _storages(way: str, mesh: DeviceMesh) -> list[StorageWeakRef]:
    """Of inputs, results and gradients, none of which has a name any more."""
    shards = [shard_sequence(torch.randn(1, 4, 16, 8), mesh, 2).requires_grad_() for _ in range(3)]
    found = [x for x in tree_leaves(WAYS[way](*shards)) if isinstance(x, Tensor)]
    if found[0].requires_grad:
        found[0].sum().backward()
    tensors = [x for x in [*shards, *found, *(x.grad for x in shards)] if x is not None]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return [StorageWeakRef(x.untyped_storage()) for x in local]
