"""Activation checkpoints of layers on the meta device, on the device or on the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.selected.op import select_op, selected_op


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost module lists and module dicts.

    >>> len(layers_of(nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})))
    2
    """
    lists = [x for x in module.modules() if isinstance(x, (nn.ModuleList, nn.ModuleDict))]
    inner = {id(part) for x in lists for part in x.modules() if part is not x}
    return [layer for x in lists if id(x) not in inner for layer in x.children()]


class AbsentTensor(NamedTuple):
    """A tensor that is on the host, without its content, which a dry run does not have."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class FarInputs:
    """Keeps the inputs of layers off the device until their backward.

    Attributes:
        held: bytes moved off the device.
        largest: bytes of the largest tensor; copies of its size are in flight while a layer runs.
    """

    def __init__(self) -> None:
        self.held = self.largest = 0

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a checkpointed layer whose inputs are kept here."""
        # The checkpoint has hooks of its own for all that its layer saves: these see inputs only.
        with saved_tensors_hooks(self.pack, self.unpack), warnings.catch_warnings():
            # Of torch 2.15: what an attention returned may go through these hooks one day.
            warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
            return forward(*args, **kwargs)

    def pack(self, x: Tensor) -> Any:
        """Take a tensor off the device."""
        self.held += x.nbytes
        self.largest = max(self.largest, x.nbytes)
        return AbsentTensor(x.shape, x.stride(), x.dtype, x.device)

    def unpack(self, x: Any) -> Tensor:
        """Return a tensor of that shape on the device."""
        return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=x.device)


def checkpoint_layers(module: nn.Module, kind: str, host: FarInputs | None = None) -> None:
    """Make each layer keep its input only, and compute its forward again in its backward.

    Args:
        module: the model.
        kind: "full", or "attention" to keep what attentions return, too.
        host: where the inputs of layers are kept; `None` for the device.
    """
    contexts = {} if kind == "full" else {"context_fn": _keeping_attention}
    # On the meta device there are no random numbers to reproduce.
    options: Any = {"use_reentrant": False, "preserve_rng_state": False, **contexts}
    for layer in layers_of(module):
        forward = partial(checkpoint, layer.forward, **options)
        layer.forward = forward if host is None else partial(host.run, forward)


def _keeping_attention() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts([ring_op, select_op, selected_op])
