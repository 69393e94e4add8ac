"""Finds layers that carry a state along the sequence, and gives them states through their cache.

Layers whose scan is known, see `scans.py`, and those that have convolutions only, run on all ranks
at once. Any other layer continues from the state that its cache returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dtensor_ring.extension import within_layer
from parallel_plans.huggingface.core.layer_inputs import ScanChunks
from parallel_plans.huggingface.core.versions import names_in_forward, parameter_of_cache
from parallel_plans.huggingface.states.scans import scan_of, with_source
from parallel_plans.huggingface.states.state_sources import StateSource

# The cache methods with which stateful layers store the state of a recurrence, and all of them.
RECURRENT = ("update_recurrent_state", "set_linear_cache")
UPDATES = ("update_conv_state", *RECURRENT)


# Maps the input of a layer, its attention mask and the source of its states to its output.
RunLayer = Callable[[Tensor, Tensor | None, StateSource], Any]


class LayerCall(NamedTuple):
    """A call of a stateful layer.

    Attributes:
        number: index of the layer among the stateful layers.
        hidden: the input of the layer, `(B, L, H)`.
        trains: whether the layer has parameters that need a gradient.
        chunks: the chunks of the batch, if the model passes them to the layer.
        is_scanned: whether all states of the layer come from `StateSource.columns` and `scanned`.
    """

    number: int
    hidden: Tensor
    trains: bool
    chunks: ScanChunks | None
    is_scanned: bool


class StatePassing(Protocol):
    """Moves states between shards of the sequence."""

    def call(self, call: LayerCall, run: RunLayer) -> Any:
        """Return the output of a layer for its tokens; this may run the layer several times."""


# Note [States through a cache]: for generation, stateful layers continue from the state in a cache.
# They read the state after the previous tokens from it, and store the state after their own. Here a
# small object replaces that cache in each call of a stateful layer, see `StateSource`.
@dataclass
class StateCache:
    """Stands in for the cache in one call of one layer.

    Attributes:
        source: gives the states, and takes them.
        has_scan: whether the scan of the layer asks the source itself.
    """

    source: StateSource
    has_scan: bool

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return `None`: given a state, a layer may take its single-token path, and store none."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state after the previous tokens; `None` starts a scan from zero."""
        return None if self.has_scan else self.source.given(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Prepend the last columns of the previous tokens to `conv_states`, `(B, C, L)`."""
        if conv_kernel_size is None:
            raise ValueError(
                f"a convolution of layer {layer_idx} does not pass its kernel size to its cache, "
                "so it is unknown how many earlier tokens it needs"
            )
        before = self.source.columns(("conv", state_idx), conv_states, conv_kernel_size - 1)
        return torch.cat([before, conv_states], -1)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Store the state after these tokens."""
        if not self.has_scan:
            self.source.ended(("recurrent", state_idx), recurrent_states)
        return recurrent_states

    # MiniMax has a cache of its own, with other names.

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state after the previous tokens, like `get_recurrent_state`."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        """Store the state after these tokens, like `update_recurrent_state`."""
        self.update_recurrent_state(state, layer_idx)


def stateful_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward stores the state after its tokens in a cache."""
    return [module for module in model.modules() if _cache_parameter(module) is not None]


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that get their attention function from transformers."""
    return [x for x in model.modules() if "ALL_ATTENTION_FUNCTIONS" in names_in_forward(x)]


def _cache_parameter(module: nn.Module) -> str | None:
    """Return the name of a module's cache parameter, if its forward stores a state there."""
    if set(UPDATES).isdisjoint(names_in_forward(module)):
        return None
    return parameter_of_cache(type(module).forward)


def keeps_states(layers: list[nn.Module]) -> bool:
    """Return whether a cache can keep the states of these layers while a model generates.

    All must be scanned, and store their states as caches of transformers do.
    """
    return all(
        scan_of(type(x).forward) is not None or set(RECURRENT).isdisjoint(names_in_forward(x))
        for x in layers
    ) and not any("set_linear_cache" in names_in_forward(x) for x in layers)


def required_parameters(layer: nn.Module) -> list[str]:
    """Return the names of the required parameters of a layer's forward after its input."""
    parameters = list(signature(type(layer).forward).parameters.values())[2:]
    return [x.name for x in parameters if x.default is x.empty and x.kind is not x.VAR_KEYWORD]


@contextmanager
def passing_states(layers: list[nn.Module], passing: StatePassing) -> Iterator[None]:
    """Open a context in which these layers pass their states on."""
    pass_states(layers, passing)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def pass_states(layers: list[nn.Module], passing: StatePassing) -> None:
    """Make these layers pass their states on from now on."""
    for number, layer in enumerate(layers):
        layer.forward = MethodType(_forward(layer, number, passing), layer)


def _forward(layer: nn.Module, number: int, passing: StatePassing) -> Callable[..., Any]:
    """Return a forward of the layer that receives its states, and sends them on."""
    plain, cache = type(layer).forward, _cache_parameter(layer)
    assert cache is not None, f"{type(layer).__name__} has no state"
    known = signature(plain)
    # The parameter after `self`, which has the hidden states in all families.
    first = [*known.parameters][1]
    needed = [name for name in required_parameters(layer) if not name.endswith("_mask")]
    has_scan = scan_of(plain) is not None
    is_scanned = has_scan or set(RECURRENT).isdisjoint(names_in_forward(layer))

    # A compiler would drop messages of the backward whose results are unused.
    @torch.compiler.disable
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ring = kwargs.pop("ring", None)  # for attention; kernels accept no other keywords
        bound = known.bind(self, *args, **kwargs)
        inputs = _of_tokens(self, {name: bound.arguments[name] for name in (first, *needed)})
        sizes = [x.shape[-1] for x in inputs.values()]
        # Several inputs of a token move between ranks as one.
        hidden = torch.cat([*inputs.values()], -1) if len(sizes) > 1 else inputs[first]
        kept = {"self": self}
        # What has values of tokens would still be in the layout of attention.
        others = {name: _without_tokens(x) for name, x in bound.arguments.items()} | kept

        def run(hidden: Tensor, mask: Tensor | None, source: StateSource) -> Any:
            scans = has_scan and not source.steps
            here = StateCache(source, scans)
            masks = dict.fromkeys((x for x in others if x.endswith("_mask")), mask)
            parts = hidden.split(sizes, -1) if len(sizes) > 1 else (hidden,)
            own = dict(zip(inputs, parts, strict=True))
            bound.arguments.update(others | masks | own | {cache: here})
            runs = with_source(plain, source, self) if scans else plain
            return runs(*bound.args, **bound.kwargs)

        trains = any(x.requires_grad for x in self.parameters())
        chunks = getattr(ring, "scan_chunks", None)
        with within_layer(self):
            return passing.call(LayerCall(number, hidden, trains, chunks, is_scanned), run)

    return forward


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """Return a layer's output with other hidden states."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def first(output: Any) -> Tensor:
    """Return the hidden states of a layer's output."""
    return output[0] if isinstance(output, tuple) else output


def _of_tokens(layer: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return a layer's inputs that have a row for each token, which go together.

    Raises:
        ValueError: if the layer takes another tensor, whose order is unknown.
    """
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    hidden = next(iter(tensors.values()))
    for name, x in tensors.items():
        if x.ndim != 3 or x.shape[:2] != hidden.shape[:2] or x.dtype != hidden.dtype:
            raise ValueError(
                f"{type(layer).__name__} carries a state, and takes {name} for its tokens beside "
                f"its input, which is not sharded with that: {tuple(x.shape)} {x.dtype}, and the "
                f"input is {tuple(hidden.shape)} {hidden.dtype}"
            )
    return tensors


def _without_tokens(x: Any) -> Any:
    """Return an argument without tensors and tuples, which may hold values of tokens."""
    if isinstance(x, dict):  # it holds further keywords
        return {name: y for name, y in x.items() if not isinstance(y, (Tensor, tuple))}
    return None if isinstance(x, (Tensor, tuple)) else x
