"""Meshes of several axes, and global tensors placed on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dtensor_ring import Balanced, Contiguous, SequenceAxis, unshard_sequence
from dtensor_ring.compute.memory import in_order, order_of
from dtensor_ring.dtensor.annotation import annotation_of, group_of
from dtensor_ring.planning.layout import Layout

BATCH, HEADS, SEQUENCE = Shard(0), Shard(1), Shard(2)
REPLICATE = Replicate()


def annotated_mesh(
    sizes: tuple[int, ...], placements: Sequence[Placement], layout: Layout | str
) -> DeviceMesh:
    """A mesh whose axis of the sequence has that layout."""
    names = tuple(f"axis{axis}" for axis in range(len(sizes)))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    SequenceAxis(mesh[names[list(placements).index(SEQUENCE)]], layout)
    return mesh


def random_inputs(
    batch: int = 2,
    seq_len: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    value_head_dim: int = 8,
    key_seq_len: int | None = None,
) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    key_seq_len = seq_len if key_seq_len is None else key_seq_len
    shapes = (
        (heads, seq_len, 8),
        (kv_heads, key_seq_len, 8),
        (kv_heads, key_seq_len, value_head_dim),
        (heads, seq_len, value_head_dim),
    )
    return [torch.randn(batch, *shape) for shape in shapes]


def place(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A tensor that every rank holds whole as a DTensor, its tokens in layout order.

    Its dimensions lie in memory as they did.
    """
    local = x
    for axis, where in enumerate(placements):
        rank, size, group = mesh.get_local_rank(axis), mesh.size(axis), mesh.get_group(axis)
        if where == SEQUENCE:
            layout = annotation_of(group).layout or Contiguous()
            local = local[:, :, layout.positions(rank, size, local.shape[2])]
        elif isinstance(where, Shard):
            chunks = local.chunk(size, where.dim)
            local = chunks[rank] if rank < len(chunks) else local.narrow(where.dim, 0, 0)
    local = in_order(local.clone(), order_of(x), x.dtype)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def assert_same(actual: Any, expected: Tensor, placements: Sequence[Placement]) -> None:
    """A float32 result equals the dense one; a DTensor is placed like the query."""
    assert actual.dtype == torch.float32
    if isinstance(actual, DTensor):
        assert actual.placements == tuple(placements)
        axis = group_of(actual.device_mesh, list(placements).index(SEQUENCE))
        layout = annotation_of(axis).layout
        actual = unshard_sequence(actual, 2, layout if isinstance(layout, Balanced) else None)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


def eager_and_compiled(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The function itself, then compiled to one graph."""
    yield function
    yield torch.compile(function, backend="aot_eager", fullgraph=True)
