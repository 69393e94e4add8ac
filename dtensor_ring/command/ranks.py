"""The ranks that the doctor tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring.transport.process_group import axis_group_options

SECONDS = 60
"""After them, a rank that does not come is told of."""


class Ranks(NamedTuple):
    """A mesh of all ranks of the launcher, and what they compute on and in."""

    mesh: DeviceMesh
    device: torch.device
    dtype: torch.dtype


@contextmanager
def connected() -> Iterator[Ranks]:
    """All ranks, connected over NCCL if each has a GPU of its own, else over gloo.

    The default process group ends with the context.

    Raises:
        RuntimeError: if ranks do not come.
    """
    local = dist.get_node_local_rank(0)
    has_gpu = torch.cuda.is_available() and local < torch.cuda.device_count()
    if has_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=timedelta(seconds=SECONDS)
    )
    try:
        device = torch.device("cuda", local) if has_gpu else torch.device("cpu")
        options = axis_group_options(device.type)
        mesh = init_device_mesh(
            *(device.type, (dist.get_world_size(),)),
            mesh_dim_names=("cp",),
            backend_override=None if options is None else {"cp": options},
        )
        # Kernels of GPUs take 16 bits only.
        yield Ranks(mesh, device, torch.bfloat16 if has_gpu else torch.float32)
    finally:
        time.sleep(0.2)  # Python aborts if it ends while gloo's threads let go of tensors
        dist.destroy_process_group()
