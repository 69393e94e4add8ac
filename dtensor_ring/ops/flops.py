"""Flops of the ops, for `torch.utils.flop_counter` and for compilers that estimate a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dtensor_ring.balanced.work import visible_pairs
from dtensor_ring.ops.decode import decode_op
from dtensor_ring.ops.decode_options import unflatten_decode
from dtensor_ring.ops.options import Call, unflatten
from dtensor_ring.ops.schema import ring_backward_op, ring_op
from dtensor_ring.planning.slices import slices_of


@register_flop_formula(ring_op.overloadpacket, get_raw=True)
def _forward_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> int:
    """Count two products, each with 2 flops per visible pair and head dim."""
    head_dim, value_head_dim = _number(query.shape[3]), _number(value.shape[3])
    return 2 * _visible_pairs(query, key, unflatten(rest)) * (head_dim + value_head_dim)


@register_flop_formula(ring_backward_op.overloadpacket, get_raw=True)
def _backward_flops(
    grad_out: Any, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any
) -> int:
    """Count five products: the recomputed scores, and gradients of scores, query, key, value."""
    pairs = _visible_pairs(query, key, unflatten(rest[2:]))
    head_dim, value_head_dim = _number(query.shape[3]), _number(value.shape[3])
    return 2 * pairs * (3 * head_dim + 2 * value_head_dim)


@register_flop_formula(decode_op.overloadpacket, get_raw=True)
def _decode_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> int:
    """Count two products over the keys of this rank, or for DTensors over those of all ranks.

    A compiler knows only lengths, so there every query sees every key.
    """
    call = unflatten_decode(rest)
    batch, heads, num_queries, head_dim = map(_number, query.shape)
    pairs = batch * num_queries * _number(key.shape[2])
    runs = call.batch.key_runs
    # Runs of several ranks without a group mean DTensors, whose group only the handler knows.
    is_whole = runs is None or len(runs) == 1
    is_known = not any(isinstance(x, FakeTensor) for x in (query, *call.batch))
    if is_known and (is_whole or call.place.group_name is not None):
        tiles = call.question(query, key).step(key).tiles
        pairs = sum(tile.area * (batch if tile.batch is None else 1) for tile in tiles)
    return 2 * heads * pairs * (head_dim + _number(value.shape[3]))


def _visible_pairs(query: Tensor, key: Tensor, call: Call) -> int:
    """Count the scored pairs of query and key, over batch and heads.

    Plain tensors count the pairs of this rank. DTensors count those of all ranks, as torch does for
    products of DTensors. A compiler knows only lengths: it counts an even share, equal on all
    ranks, of the pairs without boundaries.
    """
    batch, heads = map(_number, query.shape[:2])
    is_placed = call.place.group_name is not None
    is_known = not any(isinstance(x, FakeTensor) for x in (query, *_tensors(call)))
    if is_placed and is_known:
        # Plain tensors: this rank's plan gives the exact number.
        tiles = (
            tile
            for step in call.question(query.shape[0]).plan(query, key).steps
            for tile in step.tiles
        )
        return heads * sum(tile.area * (batch if tile.batch is None else 1) for tile in tiles)
    # After an all-to-all, each rank of a group has a part of the heads.
    num_parts = call.group.size() // call.strategy.heads if is_placed else 1
    num_queries, num_keys = _lengths(query, key, call, num_parts)
    # With `key_runs`, the queries are the last tokens of a longer sequence.
    begin = 0 if call.batch.key_runs is None else num_keys - num_queries
    slices = call.slices(batch) if is_known else None
    if slices is None:
        documents = call.documents(batch) if is_known else (None, None)
        slices = slices_of(call.scores.mask, (begin + num_queries, num_keys), *documents)
    pairs = visible_pairs(slices, (begin, begin + num_queries))
    # Slices per batch row are already summed over the rows.
    return heads * pairs * (1 if len(slices) > 1 else batch) // num_parts


def _tensors(call: Call) -> tuple[Any, ...]:
    return tuple(call.batch)


def _lengths(query: Tensor, key: Tensor, call: Call, num_parts: int) -> tuple[int, int]:
    """Return the global lengths; if only runs say them, assume parts of equal length."""
    place = call.place
    if place.seq_len is not None and place.key_seq_len is not None:
        return _number(place.seq_len), _number(place.key_seq_len)
    return _number(query.shape[2]) * num_parts, _number(key.shape[2]) * num_parts


def _number(length: Any) -> int:
    """Return a length, or the compiler's hint of a symbolic one, 0 without a hint."""
    # `int(length)` would add a guard, and each length would recompile the graph.
    example = length.node.hint if isinstance(length, torch.SymInt) else length
    return 0 if example is None else int(example)
