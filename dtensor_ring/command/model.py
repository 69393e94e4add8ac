"""A model that can be run without its weights, and the mesh that it would be trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("cp", "dp_shard", "dp_replicate")
"""Ranks that share a sequence, that share the parameters with those of "cp", and that have copies
of them, as torchtitan calls them."""


class Asked(NamedTuple):
    """What a model is to be run on."""

    seq_len: int
    """Global length, in tokens."""
    batch: int
    """Sequences of a step of these ranks."""
    layout: str
    strategy: str
    dtype: torch.dtype | None
    """Of the parameters; `None` is that of the config."""


class Model(NamedTuple):
    """A model on the meta device, with context parallelism over a mesh."""

    name: str
    module: nn.Module
    loss: Callable[[], Tensor]
    """Its forward on one batch."""


Load = Callable[[str, DeviceMesh, Asked], Model]
"""Makes the model of a spelling.

Raises ValueError if it is none, or one that context parallelism does not serve.
"""


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
