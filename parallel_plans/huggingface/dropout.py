"""Refuses attention dropout, which a ring does not have."""

from __future__ import annotations

from typing import Any

from parallel_plans.huggingface.first_attention import first_attention, two_tokens
from parallel_plans.huggingface.patterns import pattern_of


def check_dropout(model: Any) -> None:
    """Refuse a model that drops attention weights in training, in whatever mode it is now.

    Raises:
        ValueError: naming the option of its config.
    """
    tokens = two_tokens(model)
    module = first_attention(model, pattern_of, input_ids=tokens).module
    # Set this module only: in training, other modules may skip layers at random.
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
    """Return why this dropout is refused, and how to turn it off by its name in the config."""
    config = getattr(module, "config", None)
    options = config.to_dict() if config is not None else {}
    names = [name for name, x in options.items() if "drop" in name and x == dropout]
    of_attention = [name for name in names if "att" in name]
    name = (of_attention or names or ["attention_dropout"])[0]
    return (
        f"a ring has no attention dropout, and {name} is {dropout}; make the model with {name}=0, "
        f"as by from_pretrained(..., {name}=0)"
    )
