"""Indexers whose keys are pools of tokens: each pool is scored as one, and chosen as its tokens."""

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

from parallel_plans.huggingface.core.key_index import KeyIndex, KeyPools
from parallel_plans.huggingface.core.versions import parameter_of_cache
from parallel_plans.huggingface.core.whole_rows import DOCUMENTS, TOKENS
from parallel_plans.huggingface.selecting.selection import Selection

# How an attention module makes a mask of what its indexer chooses.
MASK_OF_CHOICE = "build_attention_mask_from_topk"
MASK = "attention_mask"


class PoolForm(NamedTuple):
    """How indexers of one form score pools.

    Attributes:
        parts: the attributes by which an indexer has this form.
        describe: returns, of an indexer and the inputs of its forward by name, what it describes.
        few: returns which attributes make an indexer choose two pools of this size.
        example: returns, of an indexer and a number of tokens, the inputs of a forward without a
            cache.
        tokens: returns what each query chooses of what that forward returns, `(L, L)`.
        stock_row: returns how many first numbers of a row a stock cache keeps.
        is_turned: whether keys are rotated by positions, which a stock cache keeps, too.
        counted: the token from which on pools are counted: the first of a row, `TOKENS`, or of each
            document in it, `DOCUMENTS`.
    """

    parts: tuple[str, ...]
    describe: Callable[..., KeyIndex]
    few: Callable[[int], dict[str, int]]
    example: Callable[[Any, int], dict[str, Any]]
    tokens: Callable[[Tensor], Tensor]
    stock_row: Callable[[Any], int]
    is_turned: bool
    counted: str


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
    # An indexer counts the tokens that it chooses, a selection the pools.
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
    heads, dim, rotate = indexer.index_n_heads, indexer.index_head_dim, rotation_of(indexer)
    both = indexer.index_qk_proj(hidden_states)
    query, keys = both.split([heads * dim, indexer.index_kv_heads * dim], -1)
    num_tokens = hidden_states.shape[1]
    cos, sin = (x[:, -num_tokens:].expand(len(hidden_states), -1, -1) for x in position_embeddings)
    query = indexer.q_layernorm(query.unflatten(-1, (heads, dim)))
    query = rotate(query, cos=cos, sin=sin, unsqueeze_dim=2).float()
    # These indexers give all heads the same weight.
    weights = query.new_full(query.shape[:3], dim**-0.5)
    pools = KeyPools(indexer.compress_ratio, partial(_mean_key, indexer, cos.shape[-1]))
    rows = torch.cat([keys, cos, sin], -1)
    return KeyIndex(query, rows, weights, indexer.block_topk, 1.0, pools=pools)


def _mean_key(indexer: Any, rotary_dim: int, tokens: Tensor) -> Tensor:
    keys, cos, sin = tokens.split([indexer.index_head_dim, rotary_dim, rotary_dim], -1)
    mean = indexer.k_layernorm(keys.float().mean(2).to(keys.dtype)).unsqueeze(2)
    first = {"cos": cos[:, :, 0], "sin": sin[:, :, 0]}
    return rotation_of(indexer)(mean, **first, unsqueeze_dim=2).squeeze(2)


# The function of a model's file that rotates heads by their positions.
ROTATION = "apply_rotary_pos_emb"


def rotation_of(indexer: Any) -> Callable[..., Tensor]:
    """Return the function by which the file of an indexer's class rotates heads.

    Raises:
        ValueError: if there is none, neither in that of a class that it extends.
    """
    # A class may inherit the code of its indexer from the file of another model.
    files = (sys.modules.get(kind.__module__) for kind in type(indexer).__mro__)
    found = (getattr(file, ROTATION, None) for file in files)
    rotation = next(filter(None, found), None)
    if rotation is None:
        raise ValueError(
            f"no context-parallel plan: the file of {type(indexer).__name__} has no function "
            f"{ROTATION}, by which keys of pools are rotated"
        )
    return rotation


def random_input(linear: Any, num_tokens: int) -> Tensor:
    """Return an input of a projection, `(1, L, H)`, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, num_tokens, linear.in_features, generator=generator)
    return x.to(linear.weight.device, next(linear.parameters()).dtype)


def _gated_example(indexer: Any, num_tokens: int) -> dict[str, Any]:
    hidden = random_input(indexer.wk, num_tokens)
    mask = hidden.new_ones(1, num_tokens, dtype=torch.bool)
    queries = random_input(indexer.wq_b, num_tokens)
    return {"hidden_states": hidden, "q_resid": queries, MASK: mask}


def _listed(chosen: Tensor) -> Tensor:
    """Return which tokens are in lists `(1, L, K)`, in which -1 is none."""
    num_tokens = chosen.shape[1]
    found = chosen.new_zeros(num_tokens, num_tokens + 1, dtype=torch.bool)
    # -1 becomes the column after the last token, which is cut off.
    return found.scatter_(1, chosen[0].long() % (num_tokens + 1), True)[:, :-1]


def _mean_example(indexer: Any, num_tokens: int) -> dict[str, Any]:
    hidden = random_input(indexer.index_qk_proj, num_tokens)
    # The mask of the stock code is dense and causal, `(1, 1, S, S)`.
    mask = hidden.new_ones(1, 1, num_tokens, num_tokens, dtype=torch.bool).tril()
    angles = torch.arange(num_tokens).view(1, -1, 1).expand(-1, -1, 2)
    turns = angles.cos().to(hidden), angles.sin().to(hidden)
    return {"hidden_states": hidden, "position_embeddings": turns, MASK: mask}


FORMS = (
    PoolForm(
        ("index_kpool", "index_kpool_compress_ape", "index_kpool_compress_gate", "weights_proj"),
        _by_gates,
        lambda size: {"index_topk": 2 * size},
        _gated_example,
        _listed,
        lambda indexer: 2 * indexer.head_dim + 1,
        False,
        TOKENS,
    ),
    PoolForm(
        ("index_qk_proj", "q_layernorm", "k_layernorm", "compress_ratio", "block_topk"),
        _by_means,
        lambda size: {"block_topk": 2, "token_budget": 2 * size},
        _mean_example,
        lambda mask: mask[0, 0],
        lambda indexer: indexer.index_head_dim,
        True,
        DOCUMENTS,
    ),
)


def form_of(indexer: Any) -> PoolForm | None:
    """Return how an indexer scores pools; `None` if its keys are none."""
    return next((x for x in FORMS if all(hasattr(indexer, name) for name in x.parts)), None)


# Note [Forms of an indexer]: an indexer finds its pools itself, among the keys of all tokens and a
# mask of all pairs. Under a plan its projections run as they are, on this rank's tokens, and
# what it computes of them is the description of a selection: queries, a row of numbers for each
# token, and what makes the key of a pool of such rows. The parts of an indexer say which of these
# forms it has. The plan runs its code on a small example: if it chooses other pools than the form,
# the plan refuses it.
@torch.no_grad()
def check_pools(indexers: list[Any]) -> None:
    """Refuse an indexer whose own code chooses other pools than it describes.

    Raises:
        ValueError: naming the indexer.
    """
    for indexer in {type(x): x for x in indexers}.values():
        form = form_of(indexer)
        if form is not None and not _chooses_as_described(indexer, form):
            raise ValueError(
                f"no context-parallel plan: {type(indexer).__name__} has the parts of an index of "
                "pools, but chooses other tokens than the best pools that end before a query, and "
                "all tokens after them"
            )


def _chooses_as_described(indexer: Any, form: PoolForm) -> bool:
    """Return whether an indexer chooses two pools of four as it describes, for the last queries."""
    pools = form.describe(indexer, **form.example(indexer, 1)).pools
    assert pools is not None
    # A shallow copy: it chooses few pools, the model's own goes on to choose as many as before.
    probe, size, plain = copy(indexer), pools.size, type(indexer).forward
    without_cache = {parameter_of_cache(plain) or "cache": None}
    vars(probe).update(form.few(size))
    # Four pools end before the last queries; a fifth is one token short, and must not count.
    given = form.example(probe, 5 * size - 1)
    scores = form.describe(probe, **given).scores()[0, -size:]
    chosen = form.tokens(plain(probe, **given, **without_cache))[-size:]
    pools = chosen[:, : 4 * size].unflatten(1, (4, size))
    # Of equal scores stock code may take any.
    chosen_sum, best_sum = (scores * pools[..., 0]).sum(1), scores.topk(2).values.sum(1)
    # Queries always see the tokens before them that no pool has yet.
    after = torch.ones_like(chosen[:, 4 * size :]).tril(-1)
    return (
        bool((pools.sum(1) == 2).all() and (pools == pools[..., :1]).all())
        and torch.allclose(chosen_sum, best_sum, rtol=1e-2, atol=1e-4)
        and torch.equal(chosen[:, 4 * size :], after)
    )


def pool_forward(indexer: Any, form: PoolForm) -> Callable[..., Selection]:
    """Return a forward of the indexer that returns the `Selection` of its tokens."""
    plain = type(indexer).forward
    known, cache_name = signature(plain), parameter_of_cache(plain)

    @torch.no_grad()
    def forward(self: Any, *args: Any, **kwargs: Any) -> Selection:
        given = dict(known.bind(self, *args, **kwargs).arguments)
        del given["self"]
        index, cache = form.describe(self, **given), given.get(cache_name or "")
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
        elif isinstance(indexer := getattr(module, "indexer", None), nn.Module) and form_of(
            indexer
        ):
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
        # The module cuts its mask by the choice with `&`, which gives the choice here.
        bound.arguments[MASK] = ChoiceAsMask()
        return plain(*bound.args, **bound.kwargs)

    return forward
