"""Layers that carry a state along the sequence, and the cache through which they hand it over.

Note [States through a cache]: layers with a state go on from that of a cache, for generation. They
ask it for the state after the tokens before theirs, and tell it the one after their own. Here a
small object takes the place of that cache in each call of such a layer: what it gives comes from
the rank with the tokens before, and what it is told goes to the rank with those after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature, unwrap
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dtensor_ring.extension import within_layer
from parallel_plans.huggingface.pieces import Pieces
from parallel_plans.huggingface.scan import going_on, scans
from parallel_plans.huggingface.versions import parameter_of_cache

UPDATES = ("update_conv_state", "update_recurrent_state", "set_linear_cache")
"""What layers with a state call of their cache."""

StateKey = tuple[str, int]
"""Whether a convolution or a recurrence has the state, and its number within the layer."""

States = dict[StateKey, Tensor]
"""The states of a layer, `(B, ...)`."""


Run = Callable[[Tensor, Tensor | None, States], tuple[Any, States]]
"""From a layer's input, the attention mask of its tokens and the states before them to its output
and the states after them."""


class Call(NamedTuple):
    """A call of a layer with a state."""

    number: int
    """Of the layer among those with states."""
    hidden: Tensor
    """Its input, `(B, L, H)`."""
    trains: bool
    """Whether the layer has parameters that need a gradient."""
    pieces: Pieces | None
    """Of the batch, if the layer is told."""


class Relay(Protocol):
    """Moves states between shards of the sequence."""

    def call(self, call: Call, run: Run) -> Any:
        """The output of a layer for its tokens, for which it may run several times."""


@dataclass
class HandOver:
    """A cache as one call of one layer sees it."""

    before: States
    after: States = field(default_factory=dict)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: with one, a layer may take its way for single tokens, which tells no states."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """That after the tokens before."""
        return self.before.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """These columns `(B, C, L)` after the last ones of the tokens before."""
        if conv_kernel_size is None:
            raise ValueError(
                f"a convolution of layer {layer_idx} does not tell its cache how many tokens it "
                "sees, and so not what it needs of the tokens before"
            )
        key, num_before = ("conv", state_idx), conv_kernel_size - 1
        tail = self.before.get(key)
        if tail is None:
            tail = conv_states.new_zeros(*conv_states.shape[:-1], num_before)
        whole = torch.cat([tail.to(conv_states.dtype), conv_states], -1)
        self.after[key] = whole[..., whole.shape[-1] - num_before :]
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep the state after these tokens."""
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states

    # The names of MiniMax, whose cache is its own.

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """As `get_recurrent_state`."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        """As `update_recurrent_state`."""
        self.update_recurrent_state(state, layer_idx)


def stateful_layers(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward tells a cache the state after its tokens."""
    return [module for module in model.modules() if _cache_parameter(module) is not None]


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that ask transformers for their attention function."""
    return [x for x in model.modules() if "ALL_ATTENTION_FUNCTIONS" in _names_in_forward(x)]


def _names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """The names of what a module's forward calls, and of other things that it reads."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _cache_parameter(module: nn.Module) -> str | None:
    """The name of the parameter that a module's cache comes in, if it tells that its state."""
    if set(UPDATES).isdisjoint(_names_in_forward(module)):
        return None
    return parameter_of_cache(type(module).forward)


def required_parameters(layer: nn.Module) -> list[str]:
    """The names of what a layer has to be called with, beside its input."""
    parameters = list(signature(type(layer).forward).parameters.values())[2:]
    return [x.name for x in parameters if x.default is x.empty and x.kind is not x.VAR_KEYWORD]


@contextmanager
def relayed(layers: list[nn.Module], relay: Relay) -> Iterator[None]:
    """Let these layers hand over their states by a relay."""
    relay_states(layers, relay)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def relay_states(layers: list[nn.Module], relay: Relay) -> None:
    """Let these layers hand over their states by a relay from now on."""
    for number, layer in enumerate(layers):
        layer.forward = MethodType(_forward(layer, number, relay), layer)


def _forward(layer: nn.Module, number: int, relay: Relay) -> Callable[..., Any]:
    """The layer's forward between what is received and what is sent."""
    plain, cache = type(layer).forward, _cache_parameter(layer)
    assert cache is not None, f"{type(layer).__name__} has no state"
    known = signature(plain)
    first = [*known.parameters][1]
    needed = [name for name in required_parameters(layer) if not name.endswith("_mask")]

    # A compiler would drop the messages of the backward, whose results nobody uses.
    @torch.compiler.disable
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ring = kwargs.pop("ring", None)  # of attention; kernels take no keywords but their own
        given = known.bind(self, *args, **kwargs)
        hidden = given.arguments[first]
        _refuse_more_inputs(self, {name: given.arguments[name] for name in needed})
        kept = {name: x for name, x in given.arguments.items() if name in ("self", first)}
        others = {name: _without_tokens(x) for name, x in given.arguments.items()} | kept

        def run(hidden: Tensor, mask: Tensor | None, before: States) -> tuple[Any, States]:
            here = HandOver(before)
            masks = dict.fromkeys((x for x in others if x.endswith("_mask")), mask)
            given.arguments.update(others | masks | {first: hidden, cache: here})
            state = here.get_recurrent_state(number) if scans(plain) else None
            runs = plain if state is None else going_on(plain, state)
            return runs(*given.args, **given.kwargs), here.after

        trains = any(x.requires_grad for x in self.parameters())
        with within_layer(self):
            return relay.call(Call(number, hidden, trains, getattr(ring, "pieces", None)), run)

    return forward


def _refuse_more_inputs(layer: nn.Module, given: dict[str, Any]) -> None:
    """Refuse tokens beside the input of a layer: no order of theirs is known."""
    for name, x in given.items():
        if isinstance(x, Tensor):
            raise ValueError(
                f"{type(layer).__name__} carries a state, and takes {name} for its tokens beside "
                "its input, of which only the input is dealt in the order that a state needs"
            )


def _without_tokens(x: Any) -> Any:
    """An argument of a layer but its input, if it has no numbers of tokens, in whatever order."""
    if isinstance(x, dict):  # of more keywords
        return {name: y for name, y in x.items() if not isinstance(y, (Tensor, tuple))}
    return None if isinstance(x, (Tensor, tuple)) else x
