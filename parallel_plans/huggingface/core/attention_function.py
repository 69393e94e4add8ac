"""The attention implementation named `ring`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dtensor_ring import merge_attention
from dtensor_ring.extension import numbered, within_layer
from parallel_plans.huggingface.core import patterns
from parallel_plans.huggingface.core.bias_tables import TABLE, log_scale, log_scaled, takes_table
from parallel_plans.huggingface.core.layer_inputs import InputsWithPools, LayerInputs, ScanChunks
from parallel_plans.huggingface.core.model_masks import ModelMask, PrecomputedMask
from parallel_plans.huggingface.core.modules import NO_CROSS_ATTENTION

IMPLEMENTATION = "ring"
BIASES = ("attention_bias", "alibi", "head_mask", "block_mask")
TUNED = "attn_temperature_tuning"
_BIASES = ("position_bias", *BIASES)


class KeySelection(Protocol):
    """The keys that an index chooses for each query."""

    of_pools: bool
    """Whether it knows by itself what queries see."""

    def attend(
        self,
        module: nn.Module,
        states: tuple[Tensor, Tensor, Tensor],
        inputs: LayerInputs,
        seen: dict[str, Any],
        scores: dict[str, Any],
    ) -> Tensor:
        """Return attention of each query to its keys, `(B, N, L, H)`."""


class Pools(Protocol):
    """Keys that are pools of tokens, which a layer sees beside those of tokens."""

    def attend(
        self, query: Tensor, inputs: InputsWithPools, scale: float | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return `out` and `lse` of attention to pools; `None` if there are no pools."""


class KeysBesidePools(Protocol):
    """What a layer that sees both gives attention as its keys."""

    tokens: Tensor
    pools: Pools


class RingInputs(NamedTuple):
    """What attention needs to know of the batch, passed down as the keyword `ring`.

    Attributes:
        layers: one per layer, or one for all layers if there is no cache.
        indices: positions in the batch of this rank's tokens, `(L,)`.
        layer_masks: the mask of each pattern.
        precomputed: what all layers see, if an outer model made their mask.
        past: number of tokens cached before this batch.
        scan_chunks: chunks of the sequence, for layers with a state.
        seed: the seed of attention dropout in this forward, int64, `()`; `None` without.
        pools: which tokens ranks have that layers with a window see as pools, if a cache keeps
            them; `None` if they are those of the layer.
    """

    layers: tuple[LayerInputs, ...]
    indices: Tensor
    layer_masks: patterns.LayerMasks
    precomputed: PrecomputedMask | None = None
    past: int = 0
    scan_chunks: ScanChunks | None = None
    seed: Tensor | None = None
    pools: InputsWithPools | None = None

    def of_layer(self, module: Any) -> LayerInputs:
        """Return the inputs of a layer's attention."""
        return self.layers[0] if len(self.layers) == 1 else self.layers[module.layer_idx]


def check_implementation(config: Any) -> None:
    """Refuse a model whose attention implementation was changed after the plan was applied.

    Raises:
        ValueError: naming its implementation.
    """
    chosen = config._attn_implementation
    if chosen != IMPLEMENTATION:
        raise ValueError(
            f"attention was set to {chosen!r} after the plan, and would see this rank's tokens "
            f"only; model.set_attn_implementation({IMPLEMENTATION!r}) brings the ring back"
        )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: KeySelection | None = None,
    block_indices: KeySelection | None = None,
    ring: RingInputs | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend over the whole sequence: local shards `(B, N, L, H)` give outputs `(B, L, N, H)`.

    With `indices` or `block_indices`, a query sees only keys that an index chooses of those that
    the mask shows. `position_bias` is a table by distance, see `bias_tables`. `sinks` are of each
    query, `(B, N, L, 1)`, and `s_aux` of each head.
    """
    if ring is None:
        raise ValueError(
            'attention "ring" needs the model to be called as a whole: parallelize_module with '
            "context_parallel_plan on the module that you call"
        )
    inputs = ring.of_layer(module)
    pools: Pools | None = getattr(key, "pools", None)
    # Pools ride on the key, as the interface hands on no other argument of a layer's own.
    if not type(key) is type(value) is Tensor:
        key, value = tokens_of(key), tokens_of(value)
    if position_bias is not None:
        others["position_bias"] = position_bias
    _refuse(module, query, key, others, inputs)
    query, bias = at_positions(module, query, position_bias, ring.indices, ring.past)
    scores: dict[str, Any] = {"scale": scaling}
    # Families name the same logits in two ways, and one of them has a dim for columns.
    scores["sinks"] = s_aux if sinks is None else sinks.squeeze(-1)
    if bias is not None:
        scores["relative_bias"] = bias
    indices = block_indices if indices is None else indices
    if isinstance(getattr(attention_mask, "of_pools", None), bool):
        indices = attention_mask  # a layer that makes its mask of what it chooses
    # Pools end before their queries, so the mask of tokens says nothing of them.
    by_itself = indices is not None and getattr(indices, "of_pools", False)
    seen = {} if by_itself else _seen(module, attention_mask, ring, inputs)
    with within_layer(module):
        if pools is not None:
            _refuse_indices(module, pools, softcap, dropout)
            states = query, key, value
            out = _with_pools(states, pools, ring, inputs, scores | seen)
        elif indices is None:
            if dropout:
                scores |= _dropout_of(module, dropout, ring)
            out = inputs.attend(query, key, value, softcap=softcap or 0.0, **scores, **seen)
        else:
            _refuse_indices(module, indices, softcap, dropout)
            _refuse_by_query(module, sinks=sinks, position_bias=bias)
            out = indices.attend(module, (query, key, value), inputs, seen, scores)
    return out.transpose(1, 2), None


def tokens_of(keys: Any) -> Tensor:
    """Return the keys of tokens, where a layer sees pools beside them, or the keys."""
    return getattr(keys, "tokens", keys)


def _with_pools(
    states: tuple[Tensor, Tensor, Tensor],
    pools: Pools,
    ring: RingInputs,
    inputs: Any,
    how: dict[str, Any],
) -> Tensor:
    """Return attention to tokens and to pools with one softmax, `(B, N, L, H)`."""
    # Sinks take part in that to tokens, which a query always sees.
    query, key, value = states
    # Outputs over disjoint keys merge exactly by their lse, so one softmax needs no joint call.
    found = [inputs.attend_with_lse(query, key, value, **how)]
    of_pools = pools.attend(query, ring.pools or inputs, how["scale"])
    if of_pools is not None:
        found.append(of_pools)
    return merge_attention(found)[0]


def _seen(
    module: nn.Module, attention_mask: Any, ring: RingInputs, inputs: LayerInputs
) -> dict[str, Any]:
    """Return what the layer's tokens see, as arguments of attention."""
    found = attention_mask if isinstance(attention_mask, PrecomputedMask) else ring.precomputed
    if found is not None:
        return {"slices": found.slices(inputs.begin)}
    layer_mask = _layer_mask(module, attention_mask, ring)
    cu_seqlens, mask = inputs.documents.of(layer_mask)
    return {"mask": mask, "cu_seqlens": cu_seqlens, "strategy": layer_mask.strategy}


def _layer_mask(module: nn.Module, attention_mask: Any, ring: RingInputs) -> patterns.LayerMask:
    """Return the mask of the layer's pattern."""
    name = type(module).__name__
    if isinstance(attention_mask, ModelMask):
        attention_mask = attention_mask.pattern
    if not patterns.is_pattern(attention_mask):
        what = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
        raise ValueError(
            f"{name} got the mask {what}, where the model's pattern was expected: a ring takes no "
            "mask of its own, only those that transformers.masking_utils composes"
        )
    # With a cache, or a mask that the model extends, stock attention gets a mask.
    _, is_causal, _, is_extended = attention_mask  # what maps over arguments makes it a tuple
    is_plain = is_causal and not (is_extended or ring.past)
    if is_plain and getattr(module, "is_causal", None) is False:
        raise ValueError(
            f"{name}.is_causal is False and its mask is causal: stock attention takes the one or "
            "the other, by whether rows have padding; for a model that sees both ways set "
            "model.config.is_causal=False, before the plan"
        )
    # A pattern has one mask, or one for each layer.
    layer_mask = ring.layer_masks.get(attention_mask)
    if layer_mask is None:
        of_layer = patterns.LayerPattern(attention_mask, getattr(module, "layer_idx", -1))
        layer_mask = ring.layer_masks.get(of_layer, "it was not seen when the plan was applied")
    if isinstance(layer_mask, str):
        raise ValueError(
            f"the attention pattern of {name}, {_described(attention_mask)}, cannot be computed "
            f"by a ring: {layer_mask}"
        )
    return layer_mask


def _described(pattern: patterns.Pattern) -> str:
    _, causal, size, added = pattern
    words = ["causal" if causal else "bidirectional"]
    words += [] if size is None else [f"of {size} tokens"]
    words += ["with a mask function of the model's own"] if added else []
    return " ".join(words)


def _refuse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    others: dict[str, Any],
    inputs: LayerInputs,
) -> None:
    if query.shape[2] != key.shape[2] and inputs.key_runs is None:
        raise ValueError(
            f"{type(module).__name__} attends from {query.shape[2]} to {key.shape[2]} tokens: "
            f"{NO_CROSS_ATTENTION}"
        )
    for name in _BIASES:
        if others.get(name) is None:
            continue
        # A table by distance fits any shard; a bias of pairs is of the positions in a shard.
        if name in BIASES or not takes_table(module):
            raise ValueError(f"{type(module).__name__} gives {name}, which a ring does not take")


def _refuse_indices(module: nn.Module, indices: Any, softcap: float | None, dropout: float) -> None:
    name = type(module).__name__
    if not hasattr(indices, "attend"):
        raise ValueError(
            f"{name} gives attention a {type(indices).__name__} of key indices, which count the "
            f"keys of one rank; a ring takes what an indexer with a cache of keys chooses"
        )
    if softcap:
        raise ValueError(f"{name} gives a softcap of {softcap} for keys that an index chooses")
    if dropout:
        raise ValueError(
            f"{name} drops weights of keys that an index chooses: {set_to_zero(module, dropout)}"
        )


def _refuse_by_query(module: nn.Module, **given: Tensor | None) -> None:
    for name, x in given.items():
        if x is not None:
            raise ValueError(
                f"{type(module).__name__} gives {name} beside keys that an index chooses, which "
                "take none"
            )


# The attribute that numbers the attentions of a model. A tensor: a compiler compiles layers, which
# differ in nothing else, once.
NUMBER = "context_parallel_number"


def number_attention(module: nn.Module, number: int) -> None:
    """Number an attention of a model, whose dropout is then its own."""
    setattr(module, NUMBER, torch.tensor(number, device="cpu"))


def _dropout_of(module: nn.Module, dropout: float, ring: RingInputs) -> dict[str, Any]:
    """Return the dropout of a layer, as arguments of attention."""
    number = getattr(module, NUMBER, None)
    if ring.seed is None or number is None:
        raise ValueError(
            f"{type(module).__name__} drops attention weights, {dropout}, in a forward with a "
            "cache, or since the plan was applied to a model without dropout or this layer: "
            f"{set_to_zero(module, dropout)}, or set it before the plan and use no cache"
        )
    # One seed for each layer: a layer computed again, by checkpointing, gets the same.
    return {"dropout_p": dropout, "dropout_seed": numbered(ring.seed, number)}


def at_positions(
    module: Any, query: Tensor, bias: Tensor | None, indices: Tensor, past: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Rescale queries and their bias that a layer has scaled by their position in the shard.

    Layers without rotary embeddings may scale queries by their position (Nakanishi, 2025, arXiv
    2501.19399). They count it in the tensor they see, after the cached tokens. `indices`, `(L,)`,
    are the true positions.
    """
    scale = _scale_of(module) if _may_scale(module) else None
    if scale is None:
        return query, bias
    # One factor undoes the layer's scale and applies that of the true position.
    here = past + torch.arange(query.shape[2], device=query.device)
    factor = (scale(indices) / scale(here)).view(1, 1, -1, 1)
    bias = None if bias is None else (bias * factor).to(bias.dtype)
    return (query * factor).to(query.dtype), bias


def _may_scale(module: Any) -> bool:
    """Return whether a layer has an attribute that may scale its queries.

    A module looks for a missing one among tensors and modules, which takes ten times as long.
    """
    if torch.compiler.is_compiling():  # it reads no `vars` of a module
        return True
    own, kind = vars(module), type(module)
    return TUNED in own or TABLE in own or hasattr(kind, TUNED) or hasattr(kind, TABLE)


def _scale_of(module: Any) -> Callable[[Tensor], Tensor] | None:
    """Return by which factors a layer scales queries at some positions, `None` if it does not."""
    if getattr(module, TUNED, False) and not getattr(module, "use_rope", True):
        return lambda x: (
            torch.log1p(torch.floor((x.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        )
    return partial(log_scale, module) if log_scaled(module) else None


def attention_dropout(model: Any) -> float:
    """Return which share of attention weights a model drops in training, in its mode or not."""
    tokens = patterns.two_tokens(model)
    module = patterns.first_attention(model, patterns.pattern_of, input_ids=tokens).module
    # Set this module only: in training, other modules may skip layers at random.
    was, module.training = module.training, True
    try:
        return patterns.first_attention(model, patterns.pattern_of, input_ids=tokens).dropout
    finally:
        module.training = was


def set_to_zero(module: Any, dropout: float) -> str:
    """Say how to turn a dropout off, by its name in the config."""
    config = getattr(module, "config", None)
    options = config.to_dict() if config is not None else {}
    names = [name for name, x in options.items() if "drop" in name and x == dropout]
    of_attention = [name for name in names if "att" in name]
    name = (of_attention or names or ["attention_dropout"])[0]
    return f"make the model with {name}=0, as by from_pretrained(..., {name}=0)"
