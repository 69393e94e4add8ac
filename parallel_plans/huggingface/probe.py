"""Runs a model on a few tokens, with attention in which each token sees itself only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallel_plans.huggingface.attention import at_positions
from parallel_plans.huggingface.first_attention import PROBE
from parallel_plans.huggingface.language_model import language_model_of
from parallel_plans.huggingface.patterns import pattern_of

NUM_TOKENS = 8
ROUTER_LOGITS = "output_router_logits"


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Turn dropout, noise and gradients off, and restore the model afterwards."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in was_training:
            module.training = True


def probe(model: Any, indices: tuple[int, ...], **inputs: Any) -> Any:
    """Return the model's output for the tokens at `indices`.

    In 16 bits the row is repeated until there are `NUM_TOKENS` tokens: products of other shapes
    round differently, and a router could then choose other experts.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    parameter = next(model.parameters())
    num_rows = 1 if parameter.dtype.itemsize > 2 else NUM_TOKENS // len(indices)
    index = torch.tensor([indices] * num_rows, device=parameter.device)
    config = model.config.get_text_config()
    positions = index % (getattr(config, "max_position_embeddings", None) or NUM_TOKENS)
    AttentionInterface.register(PROBE, _alone)
    AttentionMaskInterface.register(PROBE, pattern_of)
    decoder = language_model_of(model)
    decoder.set_attn_implementation(PROBE)
    if hasattr(config, ROUTER_LOGITS):  # a config may request them
        inputs = {ROUTER_LOGITS: False} | inputs

    def tell(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # This replaces any mask that a model around it has made: each token sees only itself.
        return args, kwargs | {"ring": index[0], "attention_mask": torch.ones_like(positions)}

    hook = decoder.register_forward_pre_hook(tell, with_kwargs=True)
    try:
        return model(
            input_ids=index % config.vocab_size,
            position_ids=positions,
            attention_mask=torch.ones_like(positions),
            use_cache=False,
            **inputs,
        )
    finally:
        hook.remove()


def _alone(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    ring: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return a value that depends on the query, key and value of each token alone."""
    if ring is None:
        raise ValueError(
            f"{type(module).__name__} gets no keyword arguments from the model, so that attention "
            "cannot know how the sequence is sharded; it has no context-parallel plan"
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    # No product of query and key: it would hide wrong positions that rotate both alike.
    scores = (at_positions(module, query, ring) - key.roll(1, -1)).sum(-1, keepdim=True)
    return (value * (1 + scores.tanh())).transpose(1, 2).contiguous(), None
