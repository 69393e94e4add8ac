"""Selective checkpointing that keeps what the rings of a model returned."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dtensor_ring.op import ring_op


def ring_checkpoint_contexts() -> tuple[Any, Any]:
    """Contexts for `torch.utils.checkpoint`: all is computed again in backward but attention.

    So a layer makes one ring forward and one backward, as without checkpointing, and keeps the
    output of its attention, `(B, N, L, H)`, beside its input.

    Example:
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model.activation_checkpointing_enable(
        ...     {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}
        ... )
    """
    return create_selective_checkpoint_contexts([ring_op])
