"""Connects the ranks of a launcher, for commands that measure or test on all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring.transport.transport import axis_group_options


class Ranks(NamedTuple):
    """A mesh of all ranks of the launcher, with the device and dtype of this rank."""

    mesh: DeviceMesh
    device: torch.device
    dtype: torch.dtype


# Timeout: after it, a missing rank is reported.
SECONDS = 60


@contextmanager
def connected(alone: bool = False) -> Iterator[Ranks]:
    """Connect all ranks: over NCCL if each has a GPU of its own, else over gloo.

    The default process group ends with the context.

    Args:
        alone: whether this rank is the only one, and no launcher has started it.

    Raises:
        RuntimeError: if ranks are missing.
    """
    local = dist.get_node_local_rank(0)
    has_gpu = torch.cuda.is_available() and local < torch.cuda.device_count()
    if has_gpu:
        torch.cuda.set_device(local)
    only: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=SECONDS), **only)
    try:
        device = torch.device("cuda", local) if has_gpu else torch.device("cpu")
        mesh = mesh_of_ranks(device.type, cp=dist.get_world_size())
        # GPU kernels take 16-bit dtypes only.
        yield Ranks(mesh, device, torch.bfloat16 if has_gpu else torch.float32)
    finally:
        time.sleep(0.2)  # Python aborts if it ends while gloo's threads let go of tensors
        dist.destroy_process_group()


def mesh_of_ranks(device_type: str, **axes: int) -> DeviceMesh:
    """Return a mesh of all ranks, whose groups have the options of an axis.

    Args:
        device_type: such as "cuda".
        axes: number of ranks along each, by name.
    """
    options = axis_group_options(device_type)
    overrides: Any = None if options is None else dict.fromkeys(axes, options)
    shape, names = tuple(axes.values()), tuple(axes)
    return init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override=overrides)
