"""Runs a model on two tokens, as far as its first attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PROBE = "ring_probe"


class FirstAttention(Exception):
    """The first call of attention, raised to stop the model there."""

    def __init__(self, module: nn.Module, dropout: float) -> None:
        super().__init__()
        self.module, self.dropout = module, dropout


def two_tokens(model: nn.Module) -> Tensor:
    """Return the shortest batch in which one token may see another."""
    return torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)


def first_attention(model: Any, make_mask: Callable[..., Any], **inputs: Tensor) -> FirstAttention:
    """Run a model up to its first attention; it gets its masks from `make_mask`.

    Raises:
        ValueError: if no attention goes through the attention interface, or the model computes with
            its masks.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def stop(module: nn.Module, *_: Any, dropout: float = 0.0, **__: Any) -> None:
        raise FirstAttention(module, dropout)

    AttentionInterface.register(PROBE, stop)
    AttentionMaskInterface.register(PROBE, make_mask)
    model.set_attn_implementation(PROBE)
    try:
        with torch.no_grad():
            model(use_cache=False, **inputs)
    except FirstAttention as reached:
        return reached
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} works on its masks by itself, or does not take input_ids and "
            f"keyword arguments; it has no context-parallel plan ({error})"
        ) from error
    raise ValueError(
        f"no layer of {type(model).__name__} goes through transformers' attention interface"
    )
