"""Build a model of torchtitan without weights, with ring attention in its layers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import SequenceAxis
from dtensor_ring.extension import MetaModel, ModelRequest, as_layout
from parallel_plans.torchtitan.attention import RingAttention
from parallel_plans.torchtitan.decoder import use_ring
from parallel_plans.torchtitan.documents import Documents


def model_of_function(
    module: str, function: str, mesh: DeviceMesh, asked: ModelRequest
) -> MetaModel:
    """Build the model of a config function on the meta device, with its sequence over a mesh.

    Args:
        module: name of the module that has the function.
        function: name of a function that returns a training config.
        mesh: mesh of the ranks that share the sequence.
        asked: what the model is to be run on.

    Raises:
        ValueError: if there is no such function, or a ring cannot serve its model.
    """
    config = _config(module, function)
    use_ring(config, asked.layout, strategy=asked.strategy)
    with torch.device("meta"):
        model: Any = config.build()
    if asked.dtype is not None:
        model.to(asked.dtype)
    for part in model.modules():
        if isinstance(part, RingAttention):
            part.axis = SequenceAxis(mesh, part.layout, kernel=part.kernel, policy=part.policy)
    rank, size = mesh.get_local_rank(), mesh.size()
    num_local = as_layout(asked.layout).num_tokens(rank, size, asked.seq_len)
    return MetaModel(type(model).__name__, model, lambda: _loss(model, asked, num_local))


def _config(module: str, function: str) -> Any:
    """Return the config of the model.

    Raises:
        ValueError: if the function does not return one.
    """
    try:
        found = getattr(import_module(module), function)
        return found().model_spec.model
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{module}:{function} is not a config function of torchtitan, such as "
            f"parallel_plans.torchtitan.config_registry:llama3_8b_ring_128k ({error})"
        ) from error


def _loss(model: Any, asked: ModelRequest, num_local: int) -> Tensor:
    """Compute the loss of this rank's tokens, as torchtitan does."""
    tokens = torch.zeros(asked.batch, num_local, dtype=torch.long, device="meta")
    documents = Documents(torch.tensor([0, asked.seq_len], dtype=torch.int32))
    logits = model(tokens, positions=tokens, attention_masks=documents)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
