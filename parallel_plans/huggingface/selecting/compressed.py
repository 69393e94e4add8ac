"""Layers that attend to pools of tokens beside a window of tokens, with one softmax over both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from parallel_plans.huggingface.core.key_index import KeyIndex, KeyPools
from parallel_plans.huggingface.core.layer_inputs import InputsWithPools
from parallel_plans.huggingface.selecting.pools import random_input, rotation_of


def compressing_layers(model: nn.Module) -> list[Any]:
    """Return the attention modules that have a compressor of a known form."""
    found = [x for x in model.modules() if isinstance(getattr(x, "compressor", None), nn.Module)]
    return [x for x in found if _is_known(x.compressor)]


# The parts of a compressor, and of the index that one may have.
PARTS = (
    *("compress_rate", "head_dim", "kv_proj", "gate_proj", "position_bias", "kv_norm"),
    *("rotary_emb", "rope_layer_type"),
)
INDEX_PARTS = (*PARTS, "q_b_proj", "scorer", "num_heads", "index_topk")
SCORER_PARTS = "softmax_scale", "weights_scaling", "weights_proj"


def _is_known(compressor: Any) -> bool:
    index = getattr(compressor, "indexer", None)
    has_parts = all(hasattr(compressor, name) for name in PARTS)
    if not has_parts or index is None:
        return has_parts
    has_index = all(hasattr(index, name) for name in INDEX_PARTS)
    return has_index and all(hasattr(index.scorer, name) for name in SCORER_PARTS)


@dataclass(frozen=True, eq=False)
class PooledKeys:
    """The pools that a layer attends to beside tokens, as its compressor describes them.

    Attributes:
        rows: of this rank's tokens, `(B, L, R)`.
        pools: how keys are made of them.
        index: which pools queries choose; `None` for all that end before them.
    """

    rows: Tensor
    pools: KeyPools
    index: KeyIndex | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> TokensAndPools:
        """Join pools to the keys of tokens.

        Raises:
            ValueError: for any other function.
        """
        if func is not torch.cat or not isinstance(args[0][0], Tensor) or len(args[0]) != 2:
            name = getattr(func, "__name__", str(func))
            raise ValueError(f"a layer calls {name} on keys that are pools of tokens")
        tokens, pools = args[0]
        return TokensAndPools(tokens, pools)

    def attend(
        self, query: Tensor, inputs: InputsWithPools, scale: float | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return `out` and `lse` of the pools that each query sees; `None` if there are none.

        Args:
            query: this rank's queries, `(B, N, L, H)`.
            inputs: which queries and keys the ranks have.
            scale: the factor of the scores.
        """
        if inputs.num_keys < self.pools.size:
            return None
        chosen = None
        if self.index is not None:
            chosen = _pools_in(inputs.select(self.index), self.pools.size)
        return inputs.attend_pools(query, self.rows, self.pools, chosen, scale)


@dataclass(frozen=True, eq=False)
class TokensAndPools:
    """Keys of tokens, `(B, 1, L, H)`, and pools beside them.

    Attributes:
        tokens: the keys of this rank's tokens, which are their values, too.
        pools: the pools.
    """

    tokens: Tensor
    pools: PooledKeys


def _pools_in(chosen: Tensor, size: int) -> Tensor:
    """Return the numbers of the whole pools in ascending positions `(B, L, K)`, -1 for none.

    >>> _pools_in(torch.tensor([[[4, 5, 6, -1, -1]]]).int(), 2).tolist()
    [[[2, -1]]]
    """
    # Fewer tokens than a pool has come after the pools.
    last = chosen.shape[-1] - (size - 1)
    # Positions ascend, and a chosen pool has all its tokens: first and last are `size - 1` apart.
    first, end = chosen[..., :last:size], chosen[..., size - 1 : last : size]
    return (first // size).masked_fill((first < 0) | (end - first != size - 1), -1).contiguous()


@torch.no_grad()
def check_compressors(model: nn.Module) -> None:
    """Refuse a compressor whose own code makes other pools than it describes.

    Raises:
        ValueError: naming the compressor.
    """
    for layer in {type(x.compressor): x for x in compressing_layers(model)}.values():
        if not _makes_as_described(layer.compressor, layer.q_a_proj):
            raise ValueError(
                f"no context-parallel plan: {type(layer.compressor).__name__} has the parts of a "
                "compressor of pools, but makes other keys, or shows queries other pools than the "
                "best of those that end before them"
            )


def _makes_as_described(compressor: Any, of_queries: Any) -> bool:
    """Return whether a compressor makes three pools as it describes, and shows queries the same."""
    size, index = compressor.compress_rate, getattr(compressor, "indexer", None)
    # Three whole pools, and one without its last token, which no query may see.
    hidden = random_input(of_queries, 4 * size - 1)
    queries = random_input(index.q_b_proj, 4 * size - 1) if index is not None else hidden
    positions = torch.arange(4 * size - 1, device=hidden.device).unsqueeze(0)
    keys, bias = type(compressor).forward(compressor, hidden, queries, positions, None, 0)
    described, _ = _forward(
        compressor,
        hidden_states=hidden,
        q_residual=queries,
        position_ids=positions,
        cache=None,
        layer_idx=0,
    )
    ended = (positions[0] + 1) // size
    seen = torch.arange(3, device=hidden.device) < ended.unsqueeze(1)
    if described.index is not None and described.index.k < 3:
        scores = described.index.scores()[0].masked_fill(~seen, -torch.inf)
        best = scores.topk(described.index.k).indices
        # Of pools that have not ended, `topk` takes some as well: only those that are seen count.
        seen &= torch.zeros_like(seen).scatter_(1, best, True)
    made = described.pools.keys(described.rows, None).unsqueeze(1)
    return torch.allclose(made, keys, rtol=1e-3, atol=1e-3) and torch.equal(bias[0, 0] == 0, seen)


# Note [Pools beside a window]: a layer's compressor pools the tokens of the sequence, and the layer
# joins these keys to those of its tokens. Under a plan the compressor returns a
# description in their place: rows of this rank's tokens, and what makes a key of the rows of a
# pool. The joined keys stay a pair until attention, which knows which tokens each rank has. An
# index may choose among the pools; without one a query sees all that end before it.
def describe_pools(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Make the compressors of a model describe their pools; return modules and what was changed."""
    compressors = [x.compressor for x in compressing_layers(model)]
    for compressor in compressors:
        compressor.forward = MethodType(_forward, compressor)
    return [(x, "forward") for x in compressors]


def _forward(
    self: Any,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    cache: Any,
    layer_idx: int,
) -> tuple[PooledKeys, None]:
    """Describe pools in place of making them; the first result takes the place of their keys."""
    rows, pools = _described(self, hidden_states, position_ids)
    indexer, index = getattr(self, "indexer", None), None
    if indexer is not None:
        with torch.no_grad():
            index = _index(indexer, hidden_states, q_residual, position_ids)
    if cache is not None:
        parts = [rows] if index is None else [rows, index.keys]
        # One row of a cache holds both, so that a layer has one memory for its pools.
        kept = cache.update_indexer(torch.cat(parts, -1), layer_idx)
        rows, *of_index = kept.split([x.shape[-1] for x in parts], -1)
        index = None if index is None else replace(index, keys=of_index[0])
    return PooledKeys(rows, pools, index), None


def _described(pooling: Any, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, KeyPools]:
    """Return rows of tokens, and how keys of pools are made of them."""
    kept = {"position_ids": position_ids, "layer_type": pooling.rope_layer_type}
    angles = pooling.rotary_emb(hidden, **kept)
    # A pool at the start of a document must not read the pool before it, of another one.
    is_first = (position_ids == 0).to(hidden.dtype).unsqueeze(-1)
    by_position = (x.expand(len(hidden), -1, -1) for x in (*angles, is_first))
    # Whatever a key is made of travels with its token, as a pool may lie on two ranks.
    rows = torch.cat([pooling.kv_proj(hidden), pooling.gate_proj(hidden), *by_position], -1)
    dim, width = pooling.head_dim, pooling.position_bias.shape[1]
    if width == dim:
        return rows, KeyPools(pooling.compress_rate, partial(_key, pooling))
    before = partial(_for_next, dim, width)
    return rows, KeyPools(pooling.compress_rate, partial(_overlapping_key, pooling), before)


def _index(indexer: Any, hidden: Tensor, q_residual: Tensor, position_ids: Tensor) -> KeyIndex:
    """Return by what queries choose pools."""
    rows, pools = _described(indexer, hidden, position_ids)
    kept = {"position_ids": position_ids, "layer_type": indexer.rope_layer_type}
    cos, sin = indexer.rotary_emb(hidden, **kept)
    query = indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim))
    query = rotation_of(indexer)(query, cos, sin, unsqueeze_dim=2).float()
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden).float() * scorer.weights_scaling
    return KeyIndex(query, rows, weights, indexer.index_topk, scorer.softmax_scale, pools=pools)


def _parts(pooling: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return keys, gates, and by the first token cos, sin and whether the sequence begins."""
    width = pooling.position_bias.shape[1]
    # In the order in which `_described` joins a row: keys, gates, cos and sin, first or not.
    keys, gates, angles, is_first = tokens.tensor_split([width, 2 * width, -1], -1)
    cos, sin = angles[:, :, 0].chunk(2, -1)
    return keys, gates + pooling.position_bias, cos, sin, is_first[:, :, :1].bool()


def _weighed(pooling: Any, keys: Tensor, gates: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the keys of pools, rotated to where they begin, `(B, P, D)`."""
    weights = gates.softmax(2, dtype=torch.float32).to(keys.dtype)
    made = pooling.kv_norm((keys * weights).sum(2))
    return rotation_of(pooling)(made.unsqueeze(1), cos, sin).squeeze(1)


def _key(pooling: Any, tokens: Tensor) -> Tensor:
    keys, gates, cos, sin, _ = _parts(pooling, tokens)
    return _weighed(pooling, keys, gates, cos, sin)


def _for_next(dim: int, width: int, tokens: Tensor) -> Tensor:
    """Return what the next pool takes of the tokens of a pool: the first part of keys and gates."""
    return torch.cat([tokens[..., :dim], tokens[..., width : width + dim]], -1)


def _overlapping_key(pooling: Any, tokens: Tensor, before: Tensor) -> Tensor:
    keys, gates, cos, sin, is_first = _parts(pooling, tokens)
    dim = pooling.head_dim
    earlier, earlier_gates = before.chunk(2, -1)
    earlier_gates = earlier_gates + pooling.position_bias[:, :dim]
    # Zeros also where numbers are not finite: a weight of 0 would not hide them.
    earlier = earlier.masked_fill(is_first, 0.0)
    earlier_gates = earlier_gates.masked_fill(is_first, -torch.inf)
    keys = torch.cat([earlier, keys[..., dim:]], 2)
    gates = torch.cat([earlier_gates, gates[..., dim:]], 2)
    return _weighed(pooling, keys, gates, cos, sin)
