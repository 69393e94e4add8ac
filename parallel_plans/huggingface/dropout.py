"""Attention dropout, which a ring does not have."""

from __future__ import annotations

from typing import Any

from parallel_plans.huggingface.first_attention import first_attention, two_tokens
from parallel_plans.huggingface.patterns import pattern_of


def check_dropout(model: Any) -> None:
    """Refuse a model that drops attention weights in training, be it in training now or not.

    Raises:
        ValueError: with the name that its config has for it.
    """
    tokens = two_tokens(model)
    module = first_attention(model, pattern_of, input_ids=tokens).module
    # The module alone: others, as layers that are left out at random, stay as they are.
    was, module.training = module.training, True
    try:
        dropout = first_attention(model, pattern_of, input_ids=tokens).dropout
    finally:
        module.training = was
    if dropout:
        raise ValueError(
            f"no context-parallel plan for {type(model).__name__}: {no_dropout(model, dropout)}"
        )


def no_dropout(module: Any, dropout: float) -> str:
    """Why attention with that dropout is refused, and what to do, by the name of its config."""
    config = getattr(module, "config", None)
    options = config.to_dict() if config is not None else {}
    names = [name for name, x in options.items() if "drop" in name and x == dropout]
    of_attention = [name for name in names if "att" in name]
    name = (of_attention or names or ["attention_dropout"])[0]
    return (
        f"a ring has no attention dropout, and {name} is {dropout}; make the model with {name}=0, "
        f"as by from_pretrained(..., {name}=0)"
    )
