"""Flops of the ops, for `torch.utils.flop_counter` and for compilers that estimate a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dtensor_ring.layout import Run
from dtensor_ring.op import Options
from dtensor_ring.plan import visible_pairs


@register_flop_formula(torch.ops.dtensor_ring.ring_attention, get_raw=True)
def _forward_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> int:
    """Two products of 2 flops per visible pair and head dim."""
    head_dim, value_head_dim = _number(query.shape[3]), _number(value.shape[3])
    return 2 * _visible_pairs(query, key, Options(*rest)) * (head_dim + value_head_dim)


@register_flop_formula(torch.ops.dtensor_ring.ring_attention_backward, get_raw=True)
def _backward_flops(
    grad_out: Any, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any
) -> int:
    """Five products: the scores again, and the gradients of scores, query, key and value."""
    pairs = _visible_pairs(query, key, Options(*rest[2:]))
    head_dim, value_head_dim = _number(query.shape[3]), _number(value.shape[3])
    return 2 * pairs * (3 * head_dim + 2 * value_head_dim)


def _visible_pairs(query: Tensor, key: Tensor, options: Options) -> int:
    """Pairs of query and key that are scored, over batch and heads.

    Those of this rank; on DTensors those of all ranks, as torch counts its products of DTensors.
    Compilers have lengths only: then an even share, alike on all ranks, of what is seen without
    boundaries.
    """
    batch, heads = map(_number, query.shape[:2])
    given = query, options.cu_seqlens, options.key_cu_seqlens, options.runs
    is_known = not any(isinstance(x, FakeTensor) for x in given)
    if options.group_name and is_known:
        tiles = (tile for step in options.plan(query, key).steps for tile in step.tiles)
        return heads * sum(tile.area * (batch if tile.batch is None else 1) for tile in tiles)
    lengths, world_size = (query.shape[2], key.shape[2]), 1
    if options.group_name:
        lengths, world_size = (options.seq_len, options.key_seq_len), options.group.size()
    num_queries, num_keys = map(_number, lengths)
    documents, key_documents = options.documents(batch) if is_known else (None, None)
    pairs = visible_pairs(
        *(options.mask, num_queries, documents, Run(0, num_queries)),
        *(num_keys, key_documents),
    )
    is_by_row = max(len(documents or ()), len(key_documents or ())) > 1
    return heads * pairs * (1 if is_by_row else batch) // world_size


def _number(length: Any) -> int:
    """A length, or the one that a compiler takes as an example of it, 0 where it has none."""
    example = length.node.hint if isinstance(length, torch.SymInt) else length
    return 0 if example is None else int(example)
