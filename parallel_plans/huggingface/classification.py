"""Heads that read the sequence as a whole: its last token, its first, or their mean.

The plan shards the backbone under such a head. The model's own forward then runs on the whole
batch, with its own labels and its own loss, and reads gathered outputs. A linear head runs on the
tokens of a rank, as its logits are a few numbers per token. Other heads get the gathered hidden
states, for example one that takes the first token through a layer of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WHOLE_HEADS = ("ForSequenceClassification",)

# Gathers this rank's tokens, `(B, L, ...)`, to those of the whole batch, `(B, S, ...)`.
Join = Callable[[Tensor], Tensor]


def backbone_of(model: Any) -> Any:
    """Return the part of a model whose sequence is sharded: all of it, or the backbone."""
    if not type(model).__name__.endswith(WHOLE_HEADS):
        return model
    return model.base_model


def linear_head(model: nn.Module, backbone: nn.Module) -> nn.Linear | None:
    """Return the head that reads the whole sequence, if it is one linear layer; else `None`."""
    if backbone is model:
        return None
    parts = [part for part in model.children() if part is not backbone]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], nn.Linear) else None


def join_behind(head: nn.Linear, join: Join) -> None:
    """Run the head on the tokens of this rank, and gather its outputs from all ranks."""
    plain: Any = type(head).forward

    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        if not isinstance(hidden, DTensor):
            return plain(self, hidden)
        return join(plain(self, hidden.to_local()))

    head.forward = MethodType(forward, head)
