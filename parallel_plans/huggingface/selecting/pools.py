"""Indexers whose keys are pools of tokens: each pool is scored as one, and chosen as its tokens.

Such an indexer finds its pools itself, among the keys of all tokens and a mask of all pairs. Under
a plan its projections run as they are, on this rank's tokens, and what it computes of them is the
description of a selection: queries, a row of numbers for each token, and what makes the key of a
pool of such rows. Which of these forms an indexer has is told by its parts, and a small choice of
its own code must be that of the form, else it is refused when the plan is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_plans.huggingface.core.layer_inputs import KeyIndex, KeyPools
from parallel_plans.huggingface.core.versions import parameter_of_cache
from parallel_plans.huggingface.selecting.selection import Selection

# How an attention module makes a mask of what its indexer chooses.
MASK_OF_CHOICE = "build_attention_mask_from_topk"
MASK = "attention_mask"


class PoolForm(NamedTuple):
    """How indexers of one form score pools.

    Attributes:
        parts: the attributes by which an indexer has this form.
        describe: returns, of an indexer and the inputs of its forward by name, what it describes.
        limit: the attribute that says how many tokens or pools it chooses, and
            how many of its units a pool is, by name; `None` for one.
        beside: returns, of an indexer and tokens `(B, L, H)`, its further inputs in a check.
        stock_row: returns how many first numbers of a row the stock cache keeps.
    """

    parts: tuple[str, ...]
    describe: Callable[..., KeyIndex]
    limit: tuple[str, str | None]
    beside: Callable[[Any, Tensor], dict[str, Any]]
    stock_row: Callable[[Any], int]


def _by_gates(indexer: Any, hidden_states: Tensor, q_resid: Tensor, **_: Any) -> KeyIndex:
    """Describe pools whose tokens are weighed by gates, and by their place in the pool."""
    shape = *hidden_states.shape[:2], -1, indexer.head_dim
    keys = indexer.k_norm(indexer.wk(hidden_states))
    gates = F.linear(hidden_states, indexer.index_kpool_compress_gate)
    # The stock cache keeps a last number, 1 for what is no padding.
    rows = torch.cat([keys, gates, torch.ones_like(keys[..., :1])], -1)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    weights = weights * indexer.n_heads**-0.5
    size = indexer.index_kpool
    pools = KeyPools(size, partial(_gated_key, indexer.index_kpool_compress_ape))
    query = indexer.wq_b(q_resid).view(shape).float()
    number = indexer.index_topk // size
    return KeyIndex(query, rows, weights, number, indexer.softmax_scale, pools=pools)


def _gated_key(by_place: Tensor, tokens: Tensor) -> Tensor:
    keys, gates, _ = tokens.split([by_place.shape[1], by_place.shape[1], 1], -1)
    weights = (gates.float() + by_place.float()).softmax(2).to(keys.dtype)
    return (weights * keys).sum(2)


def _by_means(
    indexer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> KeyIndex:
    """Describe pools whose key is the mean of their tokens, rotated to where the first one is."""
    heads, dim, rotate = indexer.index_n_heads, indexer.index_head_dim, _rotation_of(indexer)
    both = indexer.index_qk_proj(hidden_states)
    query, keys = both.split([heads * dim, indexer.index_kv_heads * dim], -1)
    num_tokens = hidden_states.shape[1]
    cos, sin = (
        x[:, -num_tokens:].expand(len(hidden_states), -1, -1) for x in position_embeddings
    )
    query = indexer.q_layernorm(query.unflatten(-1, (heads, dim)))
    query = rotate(query, cos=cos, sin=sin, unsqueeze_dim=2).float()
    weights = query.new_full(query.shape[:3], dim**-0.5)
    pools = KeyPools(indexer.compress_ratio, partial(_mean_key, indexer, cos.shape[-1]))
    rows = torch.cat([keys, cos, sin], -1)
    return KeyIndex(query, rows, weights, indexer.block_topk, 1.0, pools=pools)


def _mean_key(indexer: Any, rotary_dim: int, tokens: Tensor) -> Tensor:
    keys, cos, sin = tokens.split([indexer.index_head_dim, rotary_dim, rotary_dim], -1)
    mean = indexer.k_layernorm(keys.float().mean(2).to(keys.dtype)).unsqueeze(2)
    first = {"cos": cos[:, :, 0], "sin": sin[:, :, 0]}
    return _rotation_of(indexer)(mean, **first, unsqueeze_dim=2).squeeze(2)


def _rotation_of(indexer: Any) -> Callable[..., Tensor]:
    """Return the function by which the file of an indexer rotates heads."""
    return sys.modules[type(indexer).__module__].apply_rotary_pos_emb


def _queries_of(indexer: Any, hidden: Tensor) -> dict[str, Any]:
    return {"q_resid": hidden[..., :1].expand(-1, -1, indexer.q_lora_rank) + hidden.mean()}


def _turns_of(indexer: Any, hidden: Tensor) -> dict[str, Any]:
    angles = torch.arange(hidden.shape[1], device=hidden.device).view(1, -1, 1) * 0.3
    angles = angles.expand(-1, -1, indexer.index_head_dim // 2 * 2)
    return {"position_embeddings": (angles.cos().to(hidden), angles.sin().to(hidden))}


FORMS = (
    PoolForm(
        ("index_kpool", "index_kpool_compress_ape", "index_kpool_compress_gate", "weights_proj"),
        _by_gates,
        ("index_topk", "index_kpool"),
        _queries_of,
        lambda indexer: 2 * indexer.head_dim + 1,
    ),
    PoolForm(
        ("index_qk_proj", "q_layernorm", "k_layernorm", "compress_ratio", "block_topk"),
        _by_means,
        ("block_topk", None),
        _turns_of,
        lambda indexer: indexer.index_head_dim,
    ),
)


def form_of(indexer: Any) -> PoolForm | None:
    """Return how an indexer scores pools; `None` if its keys are none."""
    return next((x for x in FORMS if all(hasattr(indexer, name) for name in x.parts)), None)


def pool_forward(indexer: Any, form: PoolForm) -> Callable[..., Selection]:
    """Return a forward of the indexer that returns the `Selection` of its tokens."""
    plain = type(indexer).forward
    known, cache_name = signature(plain), parameter_of_cache(plain)

    @torch.no_grad()
    def forward(self: Any, *args: Any, **kwargs: Any) -> Selection:
        given = dict(known.bind(self, *args, **kwargs).arguments)
        del given["self"]
        index, cache = form.describe(self, **given), given.get(cache_name)
        if cache is not None:
            index = replace(index, keys=cache.update_indexer(index.keys, self.layer_idx))
        return Selection(index)

    return forward


class ChoiceAsMask:
    """Stands for the mask that an attention module cuts by what its indexer chooses.

    A selection of pools knows what queries see, so it takes the place of the mask.
    """

    dtype = torch.bool

    def __and__(self, chosen: Selection) -> Selection:
        """Return the selection."""
        return chosen


def hand_on_choice(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Make attention modules hand pools that an indexer chooses on in place of their mask.

    Returns:
        What was changed: modules, and the names of their attributes.
    """
    changed: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if hasattr(module, MASK_OF_CHOICE) and hasattr(module, "indexer"):
            changed.append((module, MASK_OF_CHOICE))
            setattr(module, MASK_OF_CHOICE, MethodType(_choice, module))
        elif isinstance(indexer := getattr(module, "indexer", None), nn.Module) and form_of(indexer):
            changed.append((module, "forward"))
            module.forward = MethodType(_with_choice_as_mask(module), module)
    return changed


def _choice(self: nn.Module, topk_indices: Any, **_: Any) -> Any:
    """Return what an indexer chooses in place of a mask of it."""
    return topk_indices


def _with_choice_as_mask(module: nn.Module) -> Callable[..., Any]:
    """Return a forward of an attention module whose indexer chooses pools."""
    plain = type(module).forward
    known = signature(plain)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = known.bind(self, *args, **kwargs)
        bound.arguments[MASK] = ChoiceAsMask()
        return plain(*bound.args, **bound.kwargs)

    return forward
