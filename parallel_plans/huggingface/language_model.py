"""Finds the language model within a model that reads more than text."""

from __future__ import annotations

from inspect import signature
from typing import Any

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
    # A base model around a language model may accept `labels` without computing a loss.
    return takes and (language_model_of(model) is model or bool(model.get_output_embeddings()))


def has_axes(model: Any) -> bool:
    """Return whether the model takes positions of several axes, `(3, B, S)` or `(4, B, S)`."""
    config = model.config.get_text_config()
    options = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    return bool([x for x in options if isinstance(x, dict) and SECTIONS in x])
