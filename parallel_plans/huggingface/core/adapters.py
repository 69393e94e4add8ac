"""Says which adapters of peft cannot run on a sharded sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

NO_ALORA = (
    "adapters that begin at a token of the sequence, aLoRA, would begin on every rank; leave "
    "alora_invocation_tokens out"
)
# Kinds of adapters whose virtual tokens are keys and values in a cache, by their names in peft.
IN_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
NO_VIRTUAL_TOKENS = (
    "prefix tuning and cartridges give the model virtual tokens in a cache, which is not supported "
    "over a sharded sequence; supported are adapters within layers, such as LoRA and IA3, and "
    "virtual tokens that are embeddings, as by PromptTuningConfig"
)


def adapters_of(model: Any) -> list[Any]:
    """Return the configs of the adapters that peft added to a model."""
    return [*(getattr(model, "peft_config", None) or {}).values()]


def check_adapters(adapters: Iterable[Any]) -> None:
    """Refuse adapters whose effect on a token depends on how the sequence is sharded.

    Args:
        adapters: configs of peft.

    Raises:
        ValueError: saying which are supported.
    """
    for adapter in adapters:
        if getattr(adapter, "alora_invocation_tokens", None):
            raise ValueError(NO_ALORA)
        if getattr(adapter, "peft_type", None) in IN_CACHE:
            raise ValueError(NO_VIRTUAL_TOKENS)
