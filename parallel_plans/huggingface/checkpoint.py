"""Selective checkpointing that keeps the results of a model's ring attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import dtensor_ring  # noqa: F401 - registers the op

RING_ATTENTION = torch.ops.dtensor_ring.ring_attention.default


def ring_checkpoint_contexts() -> tuple[Any, Any]:
    """Return contexts for `torch.utils.checkpoint` that recompute everything but attention.

    A layer runs ring attention once in forward and once in backward, as without checkpointing. It
    keeps the output of its attention, `(B, N, L, H)`, beside its input.

    Example:
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model.activation_checkpointing_enable(
        ...     {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}
        ... )
    """
    return create_selective_checkpoint_contexts([RING_ATTENTION])
