"""A model without weights, which a plan makes for the command `estimate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class ModelRequest(NamedTuple):
    """The input and the axis options that a model is estimated for.

    Attributes:
        seq_len: the global length, in tokens.
        batch: the sequences of a step of these ranks.
        layout: the layout of the axis.
        strategy: the strategy of the axis.
        dtype: the dtype of the parameters; `None` is that of the config.
        machine: what the strategy "auto" simulates, a file or a name; `None` for the default.
        cache_dtype: what a cache keeps full blocks in, `"own"` for their own dtype, or a format of
            eight bits; `None` if no cache is asked for.
        kv_dtype: the dtype in which keys and values travel, see `TransferPolicy`.
    """

    seq_len: int
    batch: int
    layout: str
    strategy: str
    dtype: torch.dtype | None
    machine: str | None = None
    cache_dtype: str | None = None
    kv_dtype: str | None = None


class MetaModel(NamedTuple):
    """A model on the meta device, with context parallelism over a mesh.

    Attributes:
        name: what reports call it.
        module: the model.
        loss: runs its forward on one batch.
        cache: runs its forward on one batch with a new cache, and returns the bytes that each rank
            keeps; `None` if it has no cache.
    """

    name: str
    module: nn.Module
    loss: Callable[[], Tensor]
    cache: Callable[[], Sequence[int]] | None = None


# Makes the model that a spec names. Raises ValueError if the spec is unknown, or context
# parallelism does not support the model.
LoadModel = Callable[[str, DeviceMesh, ModelRequest], MetaModel]
