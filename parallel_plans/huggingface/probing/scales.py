"""Checks that linear layers of other libraries treat each token by itself.

Dynamic quantisation may take one scale for all tokens that a layer gets. A rank gets its own tokens
only, so results would depend on how many ranks there are. Libraries may replace layers or their
weights before the plan or after it. So in the next forward each such layer is run twice on made-up
tokens, right before its own call, where FSDP2 has gathered its weight.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from parallel_plans.huggingface.core.modules import language_model_of
from parallel_plans.huggingface.core.patterns import frozen
from parallel_plans.huggingface.probing.probe import TOLERANCE

# Kernels of eight bits want more than 16 tokens.
NUM_TOKENS = 32
# How much larger the last token is in the second run. A scale for all tokens rounds others to zero.
LARGER = 1_000.0

# The classes of a layer and of its weight.
Kind = tuple[type, type]


class ScaleCheck:
    """Checks each linear layer once, and again if its class or that of its weight has changed.

    Args:
        plain: classes of linear layers that round nothing.
    """

    def __init__(self, *plain: type) -> None:
        self._plain = plain
        self._known: WeakKeyDictionary[nn.Module, Kind] = WeakKeyDictionary()
        self._hooks: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaleCheck:
        """Return itself: copies of a model have layers of their own."""
        return self

    def begin(self, model: Any) -> None:
        """Have the layers of a model that are not plain checked when they are called next."""
        if torch.compiler.is_compiling():
            return
        self._remove_hooks()
        decoder, head = language_model_of(model), model.get_output_embeddings()
        parts = [*decoder.named_modules()] + ([] if head is None else [("the head", head)])
        for name, layer in parts:
            kind = _kind(layer)
            if _is_linear(layer) and not self._is_plain(kind) and self._known.get(layer) != kind:
                self._check_next_call(name, layer, kind)

    def _is_plain(self, kind: Kind) -> bool:
        return kind[0] in self._plain and kind[1] in (Tensor, nn.Parameter)

    def _check_next_call(self, name: str, layer: nn.Module, kind: Kind) -> None:
        def check(_: nn.Module, given: tuple[Any, ...]) -> None:
            if torch.compiler.is_compiling() or self._known.get(layer) == kind:
                return
            if given and not _is_tokenwise(layer, given[0]):
                self._remove_hooks()  # the stock model may take these layers
                raise ValueError(
                    f"{name or 'a layer'} ({type(layer).__name__}) has one scale for all tokens "
                    "that it gets, as in dynamic quantisation, and a rank gets its own tokens, so "
                    "results would depend on the number of ranks; quantise with a scale for each "
                    "token (in torchao PerRow or PerToken), or the weights only"
                )
            self._known[layer] = kind

        self._hooks.append(layer.register_forward_pre_hook(check))

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _is_linear(layer: nn.Module) -> bool:
    # Adapters have a layer within, which is checked by itself.
    return "in_features" in vars(layer) and "base_layer" not in layer._modules


def _kind(layer: nn.Module) -> Kind:
    weight = layer._parameters.get("weight")
    return type(layer), type(weight.to_local() if isinstance(weight, DTensor) else weight)


def _is_tokenwise(layer: nn.Module, like: Any) -> bool:
    """Return whether outputs of tokens stay the same where another token is larger."""
    if not isinstance(like, Tensor) or not like.is_floating_point():
        return True
    numbers = torch.arange(NUM_TOKENS * like.shape[-1], device=like.device)
    shape = *(1,) * (like.ndim - 2), NUM_TOKENS, like.shape[-1]
    tokens = numbers.float().sin().view(shape).to(like.dtype)
    larger = torch.cat([tokens[..., :-1, :], tokens[..., -1:, :] * LARGER], -2)
    try:
        with frozen(layer):
            expected, found = (layer.forward(x)[..., :-1, :].float() for x in (tokens, larger))
    except Exception:  # code of a model may want other shapes, or return no tensor, as a router
        return True
    return bool((found - expected).norm() <= TOLERANCE * expected.norm())
