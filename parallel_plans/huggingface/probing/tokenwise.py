"""Checks that what other code put into a planned model treats each token by itself.

A rank gets its own tokens only, so a layer that mixes tokens would give other results on every
number of ranks. The plan examines a model when it is applied. Later a user may replace layers or
their `forward`, and a library may put in linear layers, or weights, that quantise what they get
with one scale for all tokens. So in the next forward each of these is run twice on made-up tokens,
right before its own call, where FSDP2 has gathered its weight. Hooks have a check of their own.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from parallel_plans.huggingface.core.modules import language_model_of
from parallel_plans.huggingface.core.patterns import frozen
from parallel_plans.huggingface.probing.hooks import HookCheck
from parallel_plans.huggingface.probing.probe import is_by_token
from parallel_plans.huggingface.states.stateful import attention_layers, stateful_layers

ONE_SCALE = (
    "{name} ({kind}) has one scale for all tokens that it gets, as in dynamic quantisation, and a "
    "rank gets its own tokens, so results would depend on the number of ranks; quantise with a "
    "scale for each token (in torchao PerRow or PerToken), or the weights only"
)
MIXES = (
    "{name} ({kind}) was put into the model after its context_parallel_plan, and what it gives for "
    "a token depends on other tokens, or on how many there are, of which a rank has its own only: "
    "change layers before the plan, which says what it serves, and let tokens meet in attention"
)

# The classes of a layer and of its weight.
Kind = tuple[type, type]


class TokenwiseCheck:
    """Checks each linear layer once, and each module that is new since the plan.

    Both are checked again if they change: a linear layer by its class or that of its weight, a
    module by its `forward`.

    Args:
        plain: classes of linear layers that round nothing.
    """

    def __init__(self, *plain: type) -> None:
        self._plain = plain
        self._known: WeakKeyDictionary[nn.Module, Kind] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._done: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
        self._hooks: list[RemovableHandle] = []
        self._hooks_of_users = HookCheck()
        self._is_running = False

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenwiseCheck:
        """Return itself: it knows layers by identity, and a copied model has other layers."""
        return self

    def remember(self, decoder: nn.Module) -> None:
        """Take the modules of a decoder as they are: the plan has examined them."""
        self._seen.update((module, _forward(module)) for module in decoder.modules())
        self._hooks_of_users.remember(decoder)

    def begin(self, model: Any) -> None:
        """Have what is not plain, and what is new, checked when it is called next."""
        if torch.compiler.is_compiling():
            return
        self._remove_hooks()
        self._hooks_of_users.end()
        facts = _facts(model)
        if self._done.get(model) == facts:  # as nearly always, so a forward does no more
            return
        decoder, head = language_model_of(model), model.get_output_embeddings()
        if decoder not in self._seen:  # a copy of the model
            self.remember(decoder)
        parts = [*decoder.named_modules()]
        new = {x: name for name, x in parts if self._seen.get(x) != _forward(x)}
        for name, layer in parts if head is None else [*parts, ("the head", head)]:
            if not _is_linear(layer):
                continue
            kind = _kind(layer)
            if not self._is_plain(kind) and self._known.get(layer) != kind:
                self._check_next_call(name or "a layer", layer, ONE_SCALE, kind)
        if new:
            self._check_new(decoder, new)
        # Not while a check waits: its module may run in a later forward only.
        if not self._hooks_of_users.begin(decoder) and not self._hooks:
            self._done[model] = facts

    def _is_plain(self, kind: Kind) -> bool:
        return kind[0] in self._plain and kind[1] in (Tensor, nn.Parameter)

    def _check_new(self, decoder: nn.Module, new: dict[nn.Module, str]) -> None:
        """Have new modules checked, but those in which tokens are to meet, or that never run."""
        mixing = {*attention_layers(decoder), *stateful_layers(decoder)}
        for layer, name in new.items():
            within = [*layer.modules()]
            if (
                _is_linear(layer)  # above
                or type(layer).forward is nn.Module.forward  # a list
                or hasattr(layer, "_orig_mod")  # compiled: its part is checked
                or not mixing.isdisjoint(within)
                or any(isinstance(x, FSDPModule) for x in within[1:])  # they would send messages
            ):
                self._seen[layer] = _forward(layer)
            else:
                self._check_next_call(name, layer, MIXES)

    def _check_next_call(
        self, name: str, layer: nn.Module, refusal: str, kind: Kind | None = None
    ) -> None:
        def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            is_done = self._is_running or self._is_checked(layer, kind)
            if torch.compiler.is_compiling() or is_done:
                return
            if not self._is_tokenwise(layer, args[0] if args else kwargs.get("hidden_states")):
                self._remove_hooks()  # the stock model may take these layers
                raise ValueError(refusal.format(name=name, kind=type(layer).__name__))
            if kind is None:
                self._seen[layer] = _forward(layer)
            else:
                self._known[layer] = kind

        self._hooks.append(layer.register_forward_pre_hook(check, with_kwargs=True))

    def _is_checked(self, layer: nn.Module, kind: Kind | None) -> bool:
        if kind is None:
            return self._seen.get(layer) == _forward(layer)
        return self._known.get(layer) == kind

    def _is_tokenwise(self, layer: nn.Module, like: Any) -> bool:
        self._is_running = True  # its parts are checked in their own calls
        try:
            with frozen(layer):
                return is_by_token(layer.forward, like)
        finally:
            self._is_running = False

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _facts(model: nn.Module) -> list[Any]:
    """Return what tells whether any module was replaced, or is of another kind."""
    facts: list[Any] = []
    todo: list[nn.Module | None] = [model]
    seen = set[nn.Module]()
    while todo:
        module = todo.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        own = vars(module)
        weight = own["_parameters"].get("weight")
        local = getattr(weight, "_local_tensor", None)
        forward = id(own.get("forward"))  # the object holds the module
        hooks = (*own["_forward_pre_hooks"], *own["_forward_hooks"])
        # Weak, and no tensors: these facts are kept, and must not keep a replaced layer's weights.
        facts += ref(module), type(module), forward, type(weight), type(local), hooks
        todo += own["_modules"].values()
    return facts


def _forward(module: nn.Module) -> int:
    """Return a number that tells whether a module got another forward."""
    replaced = vars(module).get("forward")
    # A module that holds itself would never die.
    return 0 if replaced is None else id(replaced)


def _is_linear(layer: nn.Module) -> bool:
    # Adapters have a layer within, which is checked by itself.
    return "in_features" in vars(layer) and "base_layer" not in layer._modules


def _kind(layer: nn.Module) -> Kind:
    weight = layer._parameters.get("weight")
    return type(layer), type(weight.to_local() if isinstance(weight, DTensor) else weight)
