"""Reads the attention patterns of a model from the masks that it requests.

Transformers composes the mask of each layer type as a function of (batch, head, query, key) and
passes it to the mask interface of the attention implementation. Our interface returns the name of
the pattern, which then reaches attention in place of a mask. The meaning of each name is found
once, when the plan is applied: the model runs on two tokens up to its first attention, and its mask
functions are compared with our masks on both sides of every boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtensor_ring import Mask
from parallel_plans.huggingface.core.language_model import has_axes
from parallel_plans.strategies import Strategies

MARKER = "ring pattern"
# With four axes of positions, the first one counts tokens. With three, none does.
AXES_WITH_TEXT = 4


class Pattern(NamedTuple):
    """The name of a mask: a tuple without tensors, which a compiler can trace.

    Attributes:
        marker: always `MARKER`.
        causal: whether transformers builds a causal mask.
        size: window or chunk in tokens; `None` without one.
        is_extended: whether the model added conditions to the mask.
    """

    marker: str
    causal: bool
    size: int | None
    is_extended: bool

    def __getitem__(self, index: Any) -> Any:
        """Return the pattern itself where a model slices its mask, and fields by number."""
        return cut(self, index) if isinstance(index, tuple) else tuple.__getitem__(self, index)


def cut(mask: Any, index: tuple[Any, ...]) -> Any:
    """Return `mask`, which stands for a mask of all tokens, if the slice keeps all of them.

    Raises:
        ValueError: if the slice drops tokens.
    """
    if any(x not in (Ellipsis, slice(None), slice(0, None)) for x in index):
        raise ValueError(
            f"the model takes a part of its mask, {list(index)}, which over a sharded sequence is "
            "a mask of all tokens"
        )
    return mask


class LayerMask(NamedTuple):
    """The mask of a pattern, and whether jumps in positions separate documents in it.

    Attributes:
        mask: the mask of one document.
        by_positions: whether a jump in positions begins a document.
        strategy: the strategy of the attention; `None` for that of the axis.
        by_axes: whether a jump in the first of four axes of positions begins a document.
    """

    mask: Mask
    by_positions: bool
    strategy: str | None = None
    by_axes: bool = False

    def restarts(self, has_axes: bool) -> bool:
        """Return whether a jump in positions begins a document."""
        return self.by_axes if has_axes else self.by_positions


# The masks of a model by pattern. A string says why a ring cannot compute the pattern.
LayerMasks = dict[Pattern, LayerMask | str]

MaskFunction = Callable[[Any, Any, Any, Any], Any]


def pattern_of(
    *,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Pattern:
    """Return the name of the pattern instead of a mask, as the mask interface named `ring`."""
    causal = allow_is_bidirectional_skip is None
    # Transformers forbids skipping a mask where the model has added to it.
    plain = allow_is_causal_skip if causal else bool(allow_is_bidirectional_skip)
    return Pattern(MARKER, causal, local_size, use_vmap or not plain)


def is_pattern(x: Any) -> bool:
    """Return whether an object passed as a mask is a pattern."""
    return isinstance(x, tuple) and len(x) == 4 and x[0] == MARKER


def read_patterns(model: Any) -> LayerMasks:
    """Return the mask of each pattern of the model, or why a ring cannot compute it.

    Raises:
        ValueError: if the model does not reach an attention that uses the attention interface, or
            does not make its masks through the mask interface.
    """
    tokens = two_tokens(model)
    whole = _mask_functions(model, tokens, attention_mask=torch.ones_like(tokens))
    # The same tokens as two documents: only masks that read positions hide the first one.
    restarted = _mask_functions(model, tokens, position_ids=tokens)
    by_axes = _with_axes(model, tokens) or whole
    if not whole:
        raise ValueError(
            f"{type(model).__name__} does not make its masks through transformers.masking_utils, "
            "so the plan cannot find which tokens its layers see; it has no context-parallel plan"
        )
    layer_masks: LayerMasks = {}
    for (pattern, function), (_, packed), (_, of_axes) in zip(
        whole, restarted, by_axes, strict=True
    ):
        mask = _mask_of(pattern, function)
        found = mask if isinstance(mask, str) else _layer_mask(mask, packed, of_axes)
        # Two masks with one name: attention could not know which one is meant.
        if layer_masks.setdefault(pattern, found) != found:
            layer_masks[pattern] = (
                f"its layers use two patterns of {pattern.size} tokens, {layer_masks[pattern]} and "
                f"{found}, which transformers does not tell apart"
            )
    return layer_masks


def with_strategies(layer_masks: LayerMasks, strategies: Strategies, world_size: int) -> LayerMasks:
    """Return the masks of a model's layers with their strategies on an axis of `world_size` ranks.

    Raises:
        ValueError: if the model has no layers of a named kind, or groups do not divide the axis.
    """
    found = {x: mask for x, mask in layer_masks.items() if isinstance(mask, LayerMask)}
    strategies.check([x.mask for x in found.values()], world_size)
    chosen = {x: y._replace(strategy=strategies.named(y.mask)) for x, y in found.items()}
    return layer_masks | chosen


def _with_axes(model: Any, tokens: Tensor) -> list[tuple[Pattern, MaskFunction]]:
    """Return the mask functions for two documents in positions of four axes, if supported."""
    if not has_axes(model):
        return []
    try:
        axes = tokens.expand(AXES_WITH_TEXT, 1, 2)
        return _mask_functions(model, tokens, position_ids=axes)
    except Exception:  # model code may raise anything for an extra axis
        return []


def _layer_mask(mask: Mask, packed: MaskFunction, of_axes: MaskFunction) -> LayerMask:
    by_positions, by_axes = (_restarts(mask, x) for x in (packed, of_axes))
    return LayerMask(mask, by_positions, by_axes=by_axes)


def _restarts(mask: Mask, packed: MaskFunction) -> bool:
    """Return whether restarted positions hide a document that the mask alone would show."""
    return mask.sees(1, 0) and not _evaluate(packed, [(1, 0)])[0]


def _mask_functions(
    model: Any, tokens: Tensor, **inputs: Tensor
) -> list[tuple[Pattern, MaskFunction]]:
    """Return the mask functions that the model builds before its first attention."""
    functions: list[tuple[Pattern, MaskFunction]] = []

    def collect(*, mask_function: MaskFunction, **kwargs: Any) -> Pattern:
        functions.append((pattern_of(**kwargs), mask_function))
        return functions[-1][0]

    first_attention(model, collect, input_ids=tokens, **inputs)
    return functions


def _mask_of(pattern: Pattern, function: MaskFunction) -> Mask | str:
    """Return the mask that shows the same pairs as `function`, or why there is none."""
    size = pattern[2]
    positions = _positions(size)
    pairs = list(product(positions, positions))
    try:
        seen = _evaluate(function, pairs)
    except (IndexError, RuntimeError) as error:
        return f"its mask looks at the batch ({type(error).__name__}: {error})"
    for mask in _candidates(size):
        if all(mask.sees(*pair) == sees for pair, sees in zip(pairs, seen, strict=True)):
            return mask
    return f"its mask is not one of {', '.join(map(str, _candidates(size)))}"


def _candidates(size: int | None) -> list[Mask]:
    """Return the masks that transformers may build from a window or chunk of `size` tokens."""
    if size is None:
        return [Mask.causal(), Mask.full()]
    # Models count a window with or without the query, or both sides together.
    both = [Mask.local(n, n) for n in {size, max(0, size - 1), size // 2}]
    one = [Mask.sliding(size - 1), Mask.chunked(size)] if size else []
    return [*one, *both, Mask.causal(), Mask.full()]


def _positions(size: int | None) -> list[int]:
    """Return positions on both sides of everything that could be a boundary."""
    # A boundary that no size in the config explains most likely lies near a power of two.
    powers = [2**power + near for power in range(20) for near in (-1, 0, 1)]
    if size is None:
        return sorted({*powers, 3, 10, 1000})
    borders = [size * n // 2 + near for n in range(8) for near in (-1, 0, 1)]
    return sorted({x for x in (*borders, *powers[:9], 50 * size) if x >= 0})


def _evaluate(function: MaskFunction, pairs: list[tuple[int, int]]) -> list[bool]:
    """Return the result of a mask function for each pair."""
    index = torch.tensor(pairs)
    # Batch and head are scalars: the ring has no mask that depends on them.
    zero = torch.zeros((), dtype=torch.long)
    result = function(zero, zero, index[:, 0], index[:, 1])
    result = torch.as_tensor(result, dtype=torch.bool).cpu()
    return result.expand(len(pairs)).tolist()


PROBE = "ring_probe"


class FirstAttention(Exception):
    """The first call of attention, raised to stop the model there."""

    def __init__(self, module: nn.Module, dropout: float) -> None:
        super().__init__()
        self.module, self.dropout = module, dropout


def two_tokens(model: nn.Module) -> Tensor:
    """Return the shortest batch in which one token may see another."""
    return torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)


def first_attention(model: Any, make_mask: Callable[..., Any], **inputs: Tensor) -> FirstAttention:
    """Run a model up to its first attention; it gets its masks from `make_mask`.

    Raises:
        ValueError: if no attention goes through the attention interface, or the model computes with
            its masks.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def stop(module: nn.Module, *_: Any, dropout: float = 0.0, **__: Any) -> None:
        raise FirstAttention(module, dropout)

    AttentionInterface.register(PROBE, stop)
    AttentionMaskInterface.register(PROBE, make_mask)
    model.set_attn_implementation(PROBE)
    try:
        with torch.no_grad():
            model(use_cache=False, **inputs)
    except FirstAttention as reached:
        return reached
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} works on its masks by itself, or does not take input_ids and "
            f"keyword arguments; it has no context-parallel plan ({error})"
        ) from error
    raise ValueError(
        f"no layer of {type(model).__name__} goes through transformers' attention interface"
    )


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Turn dropout, noise and gradients off, and restore the model afterwards."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in was_training:
            module.training = True
