"""The mesh that a model would be trained on, with no other rank there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("cp", "dp_shard", "dp_replicate")
"""Ranks that share a sequence, that share the parameters with those of "cp", and that have copies
of them, as torchtitan calls them."""


@contextmanager
def alone(world_size: int) -> Iterator[DeviceMesh]:
    """A mesh of which this process is the last rank, and the others are not there.

    Of a causal mask the last rank has the latest tokens, so it gets most keys and values. The
    default process group ends with the context.

    Raises:
        ValueError: if there is a process group already.
    """
    # The backend and its store are of torch's own tests, which make meshes so.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("this process is a rank of a group; start it without a launcher")
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()
