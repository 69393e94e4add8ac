"""Make the mesh that a model would be trained on, without the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Names as in torchtitan: "cp" ranks share a sequence; "dp_shard" and "cp" ranks share the
# parameters; "dp_replicate" ranks have copies of the parameters.
AXES = ("cp", "dp_shard", "dp_replicate")


@contextmanager
def alone(world_size: int) -> Iterator[DeviceMesh]:
    """Make a mesh with this process as the last rank, and without the other ranks.

    With a causal mask, the last rank has the latest tokens and receives the most keys and values.
    The default process group ends with the context.

    Raises:
        ValueError: if there is a process group already.
    """
    # PyTorch's own tests make meshes with this backend and store.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("this process is a rank of a group; start it without a launcher")
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()
