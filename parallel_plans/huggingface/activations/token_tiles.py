"""Runs modules over tiles of a rank's tokens, computed again in backward; finds such modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from parallel_plans.huggingface.core.modules import origin
from parallel_plans.huggingface.core.patterns import frozen
from parallel_plans.huggingface.probing.probe import probe
from parallel_plans.huggingface.selecting.indexers import describing_scores
from parallel_plans.huggingface.states.stateful import attention_layers, stateful_layers


def num_tokens_of(x: Tensor) -> int:
    """Return the number of tokens of `(B, L, ...)`, or of `(B * L, ...)` if it has two dims."""
    return x.shape[0] * x.shape[1] if x.ndim > 2 else x.shape[0]


def check_tile(num_tokens: int | None) -> None:
    """Check the size of tiles.

    Raises:
        ValueError: if it is not a positive number of tokens, or `None`.
    """
    is_size = isinstance(num_tokens, int) and not isinstance(num_tokens, bool) and num_tokens > 0
    if num_tokens is not None and not is_size:
        raise ValueError(
            f"mlp_tile is a number of tokens, such as 4096, or None for no tiles, got {num_tokens}"
        )


# Note [Tiles of tokens]: an MLP makes several tensors that are wider than its input. Run over
# tiles, it has those of one tile at a time, and keeps nothing but its input. Each tile is a
# checkpoint of torch, inside the module's forward. So hooks of the module (FSDP2, tensor
# parallelism) run once, around all tiles; a backward finds the parameters that FSDP2 gathered for
# the layer; and autograd sums the gradient of a parameter over the tiles before anyone sees it: in
# place, so there are two of them at most, and FSDP2 reduces one.
def run_in_tiles(module: nn.Module, name: str, num_tokens: int) -> None:
    """Let a module whose tokens do not interact run over tiles of `num_tokens` tokens.

    Args:
        module: takes and returns tensors with all its tokens, see `num_tokens_of`.
        name: its name, for errors.
        num_tokens: the size of a tile; the last one may be smaller.

    Raises:
        ValueError: if another library replaced its forward.
    """
    if "forward" in vars(module):
        raise ValueError(
            f"the forward of {name} was replaced already, by {origin(module.forward)}; apply the "
            "plan before, or leave mlp_tile out"
        )

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Found in the call: FSDP2 changes the class of a module.
        run = partial(type(self).forward, self)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if len({num_tokens_of(x) for x in tensors}) != 1:  # no tokens, or not of each
            return run(*args, **kwargs)
        return _in_tiles(run, leaves, spec, num_tokens)

    module.forward = MethodType(forward, module)


def join_tiles(outputs: tuple[Tensor, ...], num_tokens: int) -> tuple[Tensor, ...]:
    """Join what was recorded of each tile, `(tile, E)`, to `(num_tokens, E)` for each layer.

    Transformers records the logits of routers by hooks, which see tiles. A layer without tiles has
    a whole tensor already.

    Example:
        >>> tiles = torch.zeros(4, 2), torch.ones(1, 2), torch.ones(5, 2)
        >>> [len(x) for x in join_tiles(tiles, 5)]
        [5, 5]
    """
    layers: list[list[Tensor]] = []
    for tile in outputs:
        is_complete = not layers or sum(map(len, layers[-1])) == num_tokens
        layers += [[]] if is_complete else []
        layers[-1].append(tile)
    return tuple(x[0] if len(x) == 1 else torch.cat(x) for x in layers)


def _in_tiles(run: Callable[..., Any], leaves: list[Any], spec: TreeSpec, size: int) -> Any:
    """Run a function over tiles of the tokens in `leaves`, and join what it returns."""
    flat = [x.flatten(0, 1) if _has_rows(x) else x for x in leaves]
    num_tiles = -(-next(len(x) for x in flat if isinstance(x, Tensor)) // size)
    parts = [x.split(size) if isinstance(x, Tensor) else [x] * num_tiles for x in flat]
    has_rows = [_has_rows(x) for x in leaves]

    def run_tile(*tile: Any) -> Any:
        inputs = [x.unsqueeze(0) if wide else x for x, wide in zip(tile, has_rows, strict=True)]
        args, kwargs = tree_unflatten(inputs, spec)
        return run(*args, **kwargs)

    outputs = []
    for tile in zip(*parts, strict=True):
        # Backward computes a tile again, so that no more than one tile's activations are kept.
        if torch.is_grad_enabled():
            outputs.append(checkpoint(run_tile, *tile, use_reentrant=False))
        else:
            outputs.append(run_tile(*tile))
    return _joined(outputs, next((x.shape[:2] for x in leaves if _has_rows(x)), None))


def _has_rows(x: Any) -> bool:
    """Return whether a tensor has its tokens in two dims, `(B, L, ...)`."""
    return isinstance(x, Tensor) and x.ndim > 2


def _joined(outputs: list[Any], rows: Any) -> Any:
    """Join the outputs of tiles to those of all tokens, which have `rows`, `(B, L)`, or none."""
    leaves, spec = [tree_flatten(x)[0] for x in outputs], tree_flatten(outputs[0])[1]

    def joined(tiles: tuple[Any, ...]) -> Any:
        if not isinstance(tiles[0], Tensor):
            return tiles[0]
        if tiles[0].ndim > 2:
            return torch.cat(tiles, 1).view((*rows, *tiles[0].shape[2:]))
        return torch.cat(tiles)

    return tree_unflatten([joined(tiles) for tiles in zip(*leaves, strict=True)], spec)


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


# Note [Modules worth tiles]: a model says nowhere which of its modules are MLPs, and families name
# and nest them differently. So the model runs on a few tokens. `probing/probe.py` has shown that
# tokens interact in attention and in states of layers only. A module without such parts that takes
# and returns tensors with one entry for each token may then run over tiles of tokens. It is worth
# it if the module keeps more bytes for its backward than its input has: MLPs, blocks of experts,
# norms that compute in float32; not linear layers, nor fused norms.
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
    outermost: list[str] = []
    for name, module in decoder.named_modules():
        # A module within one that runs in tiles runs in its tiles already.
        is_inside = any(name.startswith(f"{outer}.") for outer in outermost)
        if is_inside or module not in calls or not mixing.isdisjoint(module.modules()):
            continue
        if calls[module].is_by_token() and _is_worth_it(module, calls[module]):
            outermost.append(name)
    return outermost


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
    # What goes in, comes out or is a weight is kept with tiles, too.
    others = {_storage(x) for x in (*given, *made, *module.parameters(), *module.buffers())}
    num_bytes = sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in others)
    return num_bytes > sum(x.nbytes for x in given)


def _with_grad(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
