"""Finds the language model within a model, and the head that reads its sequence as a whole.

The plan shards the backbone under such a head. The model's own forward then runs on the whole
batch, with its own labels and its own loss, and reads gathered outputs. A linear head runs on the
tokens of a rank, as its logits are a few numbers per token. Other heads get the gathered hidden
states, for example one that takes the first token through a layer of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Rotary option of configs whose positions have several axes, such as time, height and width.
SECTIONS = "mrope_section"


def language_model_of(model: Any) -> Any:
    """Return the stack of layers over one sequence: the model itself, or one of its parts.

    Returns:
        `None` if the model has several parts, but the stack is not one of them.
    """
    if not parts_beside_text(model) and model.config.get_text_config() is model.config:
        return model
    decoder = model.get_decoder()
    if "labels" in signature(decoder.forward).parameters:  # it has a head of its own
        decoder = next(filter(_is_model, decoder.children()), decoder)
    parts = [x for x in model.modules() if x is not model and _is_model(x)]
    return decoder if any(x is decoder for x in parts) else None


def parts_beside_text(model: Any) -> list[str]:
    """Return the names of models in `model` with another config type, language model included."""
    own = type(model.config)
    return [name for name, x in model.named_modules() if _is_model(x) and type(x.config) is not own]


def _is_model(x: Any) -> bool:
    return hasattr(x, "set_attn_implementation")


def takes_labels(model: Any) -> bool:
    """Return whether the model computes a loss from labels."""
    takes = "labels" in signature(model.forward).parameters
    # An outer model without a head may accept `labels` without computing a loss.
    return takes and (language_model_of(model) is model or bool(model.get_output_embeddings()))


def has_axes(model: Any) -> bool:
    """Return whether the model takes positions of several axes, `(3, B, S)` or `(4, B, S)`."""
    config = model.config.get_text_config()
    options = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    return bool([x for x in options if isinstance(x, dict) and SECTIONS in x])


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
