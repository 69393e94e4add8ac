"""Finds the modules whose tokens do not interact and that keep more than their input for backward.

A model says nowhere which of its modules are MLPs, and families name and nest them differently. So
the model runs on a few tokens. `probing/probe.py` has shown that tokens interact in attention and
in states of layers only. A module without such parts that takes and returns tensors with one entry
for each token may then run over tiles of tokens. It is worth it if the module keeps more bytes for
its backward than its input has: MLPs, blocks of experts, norms that compute in float32; not linear
layers, nor fused norms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel_plans.huggingface.activations.token_tiles import num_tokens_of
from parallel_plans.huggingface.core.patterns import frozen
from parallel_plans.huggingface.probing.probe import probe
from parallel_plans.huggingface.selecting.indexers import describing_scores
from parallel_plans.huggingface.states.stateful import attention_layers, stateful_layers

# A prime, which no other size of a model is likely to be.
NUM_TOKENS = 7


class ModuleCall(NamedTuple):
    """What a module got and returned in a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def is_by_token(self) -> bool:
        """Return whether all tensors have an entry for each token, and inputs are real numbers."""
        inputs, outputs = (
            [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
            for tree in ((self.args, self.kwargs), self.output)
        )
        is_real = any(x.is_floating_point() for x in inputs)
        return is_real and bool(outputs) and all(_is_by_token(x) for x in (*inputs, *outputs))


def _is_by_token(x: Tensor) -> bool:
    has_rows = x.ndim < 3 or x.shape[0] == 1
    return x.ndim > 1 and has_rows and num_tokens_of(x) == NUM_TOKENS


def tokenwise_modules(decoder: Any) -> list[str]:
    """Return names of the outermost modules of a decoder that are worth running over tiles.

    The decoder is left unchanged.
    """
    before = decoder.config._attn_implementation
    try:
        with frozen(decoder), describing_scores(decoder):
            return _worth_it(decoder, _calls(decoder))
    finally:
        decoder.set_attn_implementation(before)


def _worth_it(decoder: nn.Module, calls: dict[nn.Module, ModuleCall]) -> list[str]:
    mixing = {*attention_layers(decoder), *stateful_layers(decoder)}
    found: list[str] = []
    for name, module in decoder.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if is_inside or module not in calls or not mixing.isdisjoint(module.modules()):
            continue
        if calls[module].is_by_token() and _is_worth_it(module, calls[module]):
            found.append(name)
    return found


def _calls(decoder: Any) -> dict[nn.Module, ModuleCall]:
    """Run a decoder on a few tokens, and return the first call of each of its modules."""
    calls: dict[nn.Module, ModuleCall] = {}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.setdefault(module, ModuleCall(args, kwargs, output))

    hooks = [x.register_forward_hook(record, with_kwargs=True) for x in decoder.modules()]
    try:
        probe(decoder, tuple(range(NUM_TOKENS)))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _is_worth_it(module: nn.Module, call: ModuleCall) -> bool:
    """Return whether a call keeps more bytes for backward than its input has.

    What is kept anyway does not count: inputs, outputs, parameters and buffers.
    """
    args, kwargs = tree_map_only(Tensor, _with_grad, (call.args, call.kwargs))
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept[_storage(x)] = x
        return x

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x):
        output = module(*args, **kwargs)
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    made = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    others = {_storage(x) for x in (*given, *made, *module.parameters(), *module.buffers())}
    num_bytes = sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in others)
    return num_bytes > sum(x.nbytes for x in given)


def _with_grad(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
