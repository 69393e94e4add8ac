"""Checks that hooks that come after a plan change each token by itself.

A hook that only looks on is not tried: it may record what it sees. One that returns something, or
changes what it gets in place, is tried on made-up tokens, right after its first call. Hooks of
torch.distributed and accelerate move weights, not tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from parallel_plans.huggingface.probing.probe import is_by_token

NOT_TRIED = "torch.distributed", "accelerate", "dtensor_ring", "parallel_plans"
MIXES = (
    "a hook of {name} ({kind}) was set after the context_parallel_plan, and what it gives for a "
    "token depends on other tokens, on their order, or on how many there are, of which a rank has "
    "its own only: set hooks before the plan, which says what it serves, let them change each "
    "token by itself, or set them in stock_model(model)"
)

# The hooks of a module by their numbers, which no other hook gets.
Hooks = dict[int, Callable[..., Any]]


class HookCheck:
    """Tries each hook that is new since the plan once, in the first forward that calls it."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
        self._watched: list[tuple[Hooks, int, Callable[..., Any]]] = []

    def remember(self, decoder: nn.Module) -> None:
        """Take the hooks of a decoder as they are: the plan has examined them."""
        for module in decoder.modules():
            self._known[module] = {*module._forward_pre_hooks, *module._forward_hooks}

    def begin(self, decoder: nn.Module) -> bool:
        """Have new hooks tried when they are called next; return whether there are any."""
        self.end()
        for name, module in decoder.named_modules():
            known = self._known.setdefault(module, set())
            if not name and "forward" in vars(module):
                continue  # the plan's own, around which tokens are whole
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [x for x in hooks if x not in known]:
                    if _origin(hooks[number]).startswith(NOT_TRIED):
                        known.add(number)
                    else:
                        self._watch(hooks, number, name, hooks is module._forward_pre_hooks)
        return bool(self._watched)

    def end(self) -> None:
        """Put back the hooks that were not called."""
        while self._watched:
            hooks, number, watched = self._watched.pop()
            _put_back(hooks, number, watched)

    def _watch(self, hooks: Hooks, number: int, name: str, is_pre: bool) -> None:
        """Replace a hook, until it is called, by one that looks at what it changes."""
        hook = hooks[number]

        def watched(module: nn.Module, *given: Any) -> Any:
            # A compiled graph keeps what it traces, and this hook is watched once only.
            if torch.compiler.is_compiling():
                return hook(module, *given)
            _put_back(hooks, number, watched)
            before = _versions(given)
            returned = hook(module, *given)
            is_changed = returned is not None or _versions(given) != before
            if is_changed and not _is_by_token(hook, module, given, is_pre):
                raise ValueError(MIXES.format(name=name, kind=type(module).__name__))
            self._known.setdefault(module, set()).add(number)
            return returned

        watched.__wrapped__ = hook  # type: ignore[attr-defined]
        hooks[number] = watched
        self._watched.append((hooks, number, watched))


def _put_back(hooks: Hooks, number: int, watched: Any) -> None:
    if hooks.get(number) is watched:
        hooks[number] = watched.__wrapped__


def _origin(hook: Any) -> str:
    """Return the module that defines a hook."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


def _versions(given: Any) -> list[int]:
    """Return numbers that grow when tensors change in place."""
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor) and not x.is_inference()]
    return [x._version for x in tensors]


def _is_by_token(hook: Any, module: nn.Module, given: tuple[Any, ...], is_pre: bool) -> bool:
    """Return whether a hook changes the first floating tensor that it gets token by token."""
    kept, changed = ((), given) if is_pre else (given[:-1], given[-1])
    leaves, spec = tree_flatten(changed)
    place = next((i for i, x in enumerate(leaves) if _is_floating(x)), None)
    if place is None:
        return True

    def run(x: Tensor) -> Tensor:
        x = x.clone()  # a hook may change it in place
        tokens = tree_unflatten([*leaves[:place], x, *leaves[place + 1 :]], spec)
        found = hook(module, *kept, *(tokens if is_pre else [tokens]))
        return x if found is None else next(filter(_is_floating, tree_leaves(found)))

    return is_by_token(run, leaves[place])


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
