"""Reads the attention patterns of a model from the masks that it requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtensor_ring import Mask
from parallel_plans.huggingface.core.local_attention import keeping_local_attention
from parallel_plans.huggingface.core.modules import has_axes
from parallel_plans.strategies import Strategies

MARKER = "ring pattern"
# The position of a query behind any window that a mask function of a model may have.
LATE = 2**17
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

    It may take the first of its heads, which see the same keys.

    Raises:
        ValueError: if the slice drops tokens.
    """
    kept = index if index[1:2] != (0,) else index[:1] + index[2:]
    if any(x not in (Ellipsis, slice(None), slice(0, None)) for x in kept):
        raise ValueError(
            f"the model takes a part of its mask, {list(index)}, which over a sharded sequence is "
            "a mask of all tokens"
        )
    return mask


class LayerPattern(NamedTuple):
    """A pattern in one layer, for models whose layers see different keys by one pattern.

    Attributes:
        pattern: the pattern.
        layer: `layer_idx` of the attention module.
    """

    pattern: Pattern
    layer: int


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


# The masks of a model by pattern, or by layer where layers with one pattern differ. A string says
# why a ring cannot compute the pattern.
LayerMasks = dict[Pattern | LayerPattern, LayerMask | str]

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
    return type(x) is Pattern or (isinstance(x, tuple) and len(x) == 4 and x[0] == MARKER)


# Note [Patterns by name]: transformers composes the mask of each layer type as a function of
# (batch, head, query, key) and passes it to the mask interface of the attention implementation. Our
# interface returns the name of the pattern, which then reaches attention in place of a mask. The
# meaning of each name is found once, when the plan is applied: the model runs on two tokens, and
# its mask functions are compared with our masks on both sides of every boundary. If masks with one
# name differ, as where layers have different windows, the meaning is kept by layer.
def read_patterns(model: Any, sees_by_place: bool = False) -> LayerMasks:
    """Return the mask of each pattern of the model, or why a ring cannot compute it.

    Args:
        model: the model.
        sees_by_place: whether its layers may make no masks: causal ones, of rows of one document.

    Raises:
        ValueError: if the model does not reach an attention that uses the attention interface, or
            does not make its masks through the mask interface.
    """
    tokens = two_tokens(model)
    with frozen(model):
        whole = _requests(model, tokens, attention_mask=torch.ones_like(tokens))
        # The same tokens as two documents: only masks that read positions hide the first one.
        restarted = _requests(model, tokens, position_ids=tokens)
        by_axes = _with_axes(model, tokens) or whole
        longer = whole
        if any(x.pattern.is_extended for x in whole):
            more = tokens.repeat(1, 4)
            longer = _requests(model, more, attention_mask=torch.ones_like(more))
    if not whole and sees_by_place:
        return {pattern_of(): LayerMask(Mask.causal(), by_positions=False)}
    if not whole:
        raise ValueError(
            f"{type(model).__name__} does not make its masks through transformers.masking_utils, "
            "so the plan cannot find which tokens its layers see; it has no context-parallel plan"
        )
    by_pattern: dict[Pattern, list[tuple[LayerMask | str, list[int | None]]]] = {}
    for request, packed, of_axes, again in zip(whole, restarted, by_axes, longer, strict=True):
        mask = _mask_of(request.pattern, request.function)
        # A mask may be drawn from the batch, which two tokens cannot show.
        if again is not request and _mask_of(again.pattern, again.function) != mask:
            mask = "its mask depends on the batch, and is another one with more tokens"
        if not isinstance(mask, str):
            mask = _wider(mask, request.windows) or _layer_mask(
                mask, packed.function, of_axes.function
            )
        by_pattern.setdefault(request.pattern, []).append((mask, request.layers))
    layer_masks: LayerMasks = {}
    for pattern, masks in by_pattern.items():
        layer_masks |= _told_apart(pattern, masks)
    return layer_masks


def by_layer(layer_masks: LayerMasks) -> bool:
    """Return whether masks were read that other layers with the same pattern may not have."""
    return any(isinstance(x, LayerPattern) or x.is_extended for x in layer_masks)


def _told_apart(
    pattern: Pattern, masks: list[tuple[LayerMask | str, list[int | None]]]
) -> LayerMasks:
    """Return the mask of a pattern, or that of each layer if they differ.

    Args:
        pattern: the pattern that all of them have.
        masks: each mask, and the layers that use it.
    """
    first = masks[0][0]
    if all(mask == first for mask, _ in masks):
        return {pattern: first}
    of_layer: LayerMasks = {}
    for mask, layers in masks:
        for layer in layers:
            known = (
                None if layer is None else of_layer.setdefault(LayerPattern(pattern, layer), mask)
            )
            if known != mask:
                names = " and ".join(sorted({_worded(x) for x, _ in masks}))
                reason = (
                    f"its layers use different masks, {names}, by one name, and have no layer_idx "
                    "of their own that would tell which layer has which"
                )
                return {pattern: reason}
    return of_layer


def _wider(mask: Mask, windows: list[int | None]) -> str | None:
    """Return a reason if a mask shows keys that the layers' own window hides in flash attention."""
    hidden = (x for x in windows if x and (mask.left is None or mask.left >= x))
    if mask.chunk is not None or (window := next(hidden, None)) is None:
        return None
    return (
        f"its mask is {mask}, but the layer gives attention a sliding_window of {window} beside it,"
        f" which only flash attention applies. {OWN_MASKS}"
    )


def _worded(mask: LayerMask | str) -> str:
    return mask if isinstance(mask, str) else str(mask.mask)


def with_strategies(layer_masks: LayerMasks, strategies: Strategies, world_size: int) -> LayerMasks:
    """Return the masks of a model's layers with their strategies on an axis of `world_size` ranks.

    Raises:
        ValueError: if the model has no layers of a named kind, or groups do not divide the axis.
    """
    found = {x: mask for x, mask in layer_masks.items() if isinstance(mask, LayerMask)}
    strategies.check([x.mask for x in found.values()], world_size)
    chosen = {x: y._replace(strategy=strategies.named(y.mask)) for x, y in found.items()}
    return layer_masks | chosen


def _with_axes(model: Any, tokens: Tensor) -> list[Request]:
    """Return the masks for two documents in positions of four axes, if supported."""
    if not has_axes(model):
        return []
    try:
        axes = tokens.expand(AXES_WITH_TEXT, 1, 2)
        return _requests(model, tokens, position_ids=axes)
    except Exception:  # model code may raise anything for an extra axis
        return []


def _layer_mask(mask: Mask, packed: MaskFunction, of_axes: MaskFunction) -> LayerMask:
    by_positions, by_axes = (_restarts(mask, x) for x in (packed, of_axes))
    return LayerMask(mask, by_positions, by_axes=by_axes)


def _restarts(mask: Mask, packed: MaskFunction) -> bool:
    """Return whether restarted positions hide a document that the mask alone would show."""
    # Token 1 sees token 0 by the mask; it does not if it begins a document.
    return mask.sees(1, 0) and not _evaluate(packed, [(1, 0)])[0]


class Request(NamedTuple):
    """A mask that a model asks for.

    Attributes:
        pattern: its name.
        function: the mask, as transformers composes it.
        layers: `layer_idx` of each attention that gets it; `None` for one without.
        windows: the `sliding_window` that these attentions get beside it, for flash attention.
    """

    pattern: Pattern
    function: MaskFunction
    layers: list[int | None]
    windows: list[int | None]


def _requests(model: Any, tokens: Tensor, **inputs: Tensor) -> list[Request]:
    """Return the masks that the model asks for, in order."""
    requests: list[Request] = []
    attended: list[nn.Module] = []

    def collect(*, mask_function: MaskFunction, **kwargs: Any) -> Pattern:
        requests.append(Request(pattern_of(**kwargs), mask_function, [], []))
        return requests[-1].pattern

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        attended.append(module)
        for request in requests:
            if request.pattern is attention_mask:  # equal ones may be of other layers
                request.layers.append(getattr(module, "layer_idx", None))
                request.windows.append(options.get("sliding_window"))
        return alone(query, value), None

    try:
        run_with(model, attend, collect, input_ids=tokens, **inputs)
    except Exception:  # model code may raise anything for such an attention
        if not attended:
            raise
    if not attended:
        raise ValueError(_no_attention(model))
    return requests


def _mask_of(pattern: Pattern, function: MaskFunction) -> Mask | str:
    """Return the mask that shows the same pairs as `function`, or why there is none."""
    size = pattern[2]
    try:
        mask = _fitting(function, size)
        if mask is None and size is None:
            size = _window(function)  # a mask function of the model's own has its own size
            mask = _fitting(function, size)
    except (IndexError, RuntimeError) as error:
        return f"its mask looks at the batch ({type(error).__name__}: {error})"
    return mask or f"its mask is not one of {', '.join(map(str, _candidates(size)))}"


def _fitting(function: MaskFunction, size: int | None) -> Mask | None:
    """Return the candidate that shows the same pairs as `function`, if there is one."""
    positions = _positions(size)
    pairs = list(product(positions, positions))
    seen = _evaluate(function, pairs)
    for mask in _candidates(size):
        if all(mask.sees(q, k) == sees for (q, k), sees in zip(pairs, seen, strict=True)):
            return mask
    return None


def _window(function: MaskFunction) -> int | None:
    """Return how many keys a late query sees up to its own, without a gap; `None` for all."""
    zero, lags = torch.zeros((), dtype=torch.long), torch.arange(LATE + 1)
    # From the query backwards, one key for each lag.
    seen = function(zero, zero, torch.full_like(lags, LATE), LATE - lags)
    hidden = (~torch.as_tensor(seen, dtype=torch.bool).expand(lags.shape)).nonzero()
    return int(hidden[0]) if len(hidden) else None


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

OWN_MASKS = (
    "A model that changes masks for its layers makes them by create_causal_mask of "
    "transformers.masking_utils, with and_mask_function=: one for each layer, if layers differ"
)


class FirstAttention(Exception):
    """The first call of attention, raised to stop the model there."""

    def __init__(self, module: nn.Module, dropout: float) -> None:
        super().__init__()
        self.module, self.dropout = module, dropout


def alone(query: Tensor, value: Tensor) -> Tensor:
    """Return the output of an attention in which each token sees only itself, `(B, L, N, H)`."""
    value = getattr(value, "tokens", value)  # beside pools
    # Without scores, the output of a head is its token's value.
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous()


def two_tokens(model: nn.Module) -> Tensor:
    """Return the shortest batch in which one token may see another."""
    return torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)


def first_attention(model: Any, make_mask: Callable[..., Any], **inputs: Tensor) -> FirstAttention:
    """Run a model up to its first attention; it gets its masks from `make_mask`.

    Raises:
        ValueError: if no attention goes through the attention interface, or the model computes with
            its masks.
    """

    def stop(module: nn.Module, *_: Any, dropout: float = 0.0, **__: Any) -> None:
        raise FirstAttention(module, dropout)

    try:
        run_with(model, stop, make_mask, **inputs)
    except FirstAttention as reached:
        return reached
    raise ValueError(_no_attention(model))


def _no_attention(model: Any) -> str:
    return f"no layer of {type(model).__name__} goes through transformers' attention interface"


def run_with(
    model: Any, attend: Callable[..., Any], make_mask: Callable[..., Any], **inputs: Tensor
) -> None:
    """Run a model with another attention and other masks.

    Raises:
        ValueError: if its code cannot do with these masks.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    # Transformers finds both by name, so they are registered and not passed.
    AttentionInterface.register(PROBE, attend)
    AttentionMaskInterface.register(PROBE, make_mask)
    model.set_attn_implementation(PROBE)
    try:
        with torch.no_grad(), keeping_local_attention(model):
            model(use_cache=False, **inputs)
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} works on its masks by itself, or does not take input_ids and "
            f"keyword arguments; it has no context-parallel plan ({error}). {OWN_MASKS}"
        ) from error


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
