"""A model without weights, as a plan describes it to the command `estimate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class ModelRequest(NamedTuple):
    """What a model is to be run on.

    Attributes:
        seq_len: the global length, in tokens.
        batch: the sequences of a step of these ranks.
        layout: the layout of the axis.
        strategy: the strategy of the axis.
        dtype: the dtype of the parameters; `None` is that of the config.
    """

    seq_len: int
    batch: int
    layout: str
    strategy: str
    dtype: torch.dtype | None


class MetaModel(NamedTuple):
    """A model on the meta device, with context parallelism over a mesh.

    Attributes:
        name: what reports call it.
        module: the model.
        loss: runs its forward on one batch.
    """

    name: str
    module: nn.Module
    loss: Callable[[], Tensor]


LoadModel = Callable[[str, DeviceMesh, ModelRequest], MetaModel]
"""Makes the model of a spelling.

It raises ValueError if that is none, or one that context parallelism does not serve.
"""
