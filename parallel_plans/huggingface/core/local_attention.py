"""Lets an attention within a token, such as one over the blocks of layers before, be as it is.

Some models mix what their layers made of one token by an attention, whose batch are the tokens. It
takes no mask and no keyword, so nothing could tell it how the sequence is sharded, nor has to: it
keeps its own function. Should it look along the sequence after all, the probe finds that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from inspect import Parameter, signature
from typing import Any

from torch import nn

from parallel_plans.huggingface.core.versions import names_in_forward

# The name by which a layer finds the attention function in its own file.
OWN = "eager"


def keep_local_attention(model: nn.Module) -> dict[nn.Module, Any]:
    """Give each such attention a config of its own, which asks for its own function.

    Returns:
        The configs that they had before.
    """
    before: dict[nn.Module, Any] = {
        module: module.config
        for module in model.modules()
        if hasattr(module, "config") and _is_local(module)
    }
    # Modules that shared a config share its copy.
    own = {id(config): deepcopy(config) for config in before.values()}
    for config in own.values():
        config._attn_implementation = OWN
    for module, config in before.items():
        module.config = own[id(config)]
    return before


@contextmanager
def keeping_local_attention(model: nn.Module) -> Iterator[None]:
    """Open a context in which each such attention has its own function."""
    before = keep_local_attention(model)
    try:
        yield
    finally:
        for module, config in before.items():
            module.config = config


def _is_local(module: nn.Module) -> bool:
    if "ALL_ATTENTION_FUNCTIONS" not in names_in_forward(module):
        return False
    parameters = signature(type(module).forward).parameters.values()
    takes_keywords = any(x.kind is Parameter.VAR_KEYWORD for x in parameters)
    return not takes_keywords and not any(x.name.endswith("mask") for x in parameters)
