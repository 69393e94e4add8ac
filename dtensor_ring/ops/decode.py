"""The decode op: a few queries, equal on all ranks, attend to the keys that each rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor_ring.compute.accumulate import Partial
from dtensor_ring.compute.execute import Pair, forward_step
from dtensor_ring.compute.kernels import Kernel, Scores
from dtensor_ring.compute.memory import empty, in_order, order_of
from dtensor_ring.compute.sinks import add_sinks
from dtensor_ring.compute.trace import Label
from dtensor_ring.ops.check import check_inputs, check_num_queries
from dtensor_ring.ops.decode_options import DECODE_SCHEMA, MAX_QUERIES, unflatten_decode
from dtensor_ring.ops.schema import check_batch
from dtensor_ring.ops.strides import loadable, unit_stride
from dtensor_ring.ops.word import agreed_decode
from dtensor_ring.planning.plan import Step
from dtensor_ring.transport.combine import Combine

DECODE = "dtensor_ring::decode_attention"

torch.library.define(
    DECODE, f"(Tensor query, Tensor key, Tensor value, {DECODE_SCHEMA}) -> (Tensor out, Tensor lse)"
)
decode_op = torch.ops.dtensor_ring.decode_attention.default


def forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Run the decode op on plain tensors."""
    call = unflatten_decode(options)
    check_inputs(query, key, value, call.scores.sinks)
    check_num_queries(query, MAX_QUERIES)
    question = call.question(query, key)
    with agreed_decode(call, question, query, value) as combine:
        # Within the context: an error of this rank is reported to the others.
        step, kernel = question.step(key), call.select(query, value, question)
        query, key, value = loadable(query, key, value)
        return decode(query, (key, value), step, kernel, call.scores, combine)


def decode(
    query: Tensor, kv: Pair, step: Step, kernel: Kernel, scores: Scores, combine: Combine | None
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of the queries over the columns of all ranks.

    Args:
        query: `(B, N, M, H)`, the same on every rank.
        kv: keys and values that this rank holds.
        step: this rank's step, with the tiles that the queries see.
        kernel: the block kernel.
        scores: how a query scores a key.
        combine: merges the partial results of the ranks; `None` if this rank has all keys.
    """
    label, value_head_dim = Label("decode", 0, step.source), kv[1].shape[3]
    if combine is None:
        partial = Partial(query, value_head_dim, scores.sinks)
    else:
        # Partials stay wide: the result is rounded once, after the last merge and the sinks.
        wide = torch.promote_types(query.dtype, torch.float32)
        partial = Partial(query, value_head_dim, dtype=wide)
    # Without segments: a varlen kernel packs the batch into one dim, which would copy the keys.
    forward_step(step, query, kv, partial, kernel, scores, label, with_segments=False)
    out, lse = partial.result()
    if combine is None:
        return out, lse
    with label("merge"):
        out, lse = combine(out, lse)
        if scores.sinks is not None:
            lse = add_sinks(out, lse, scores.sinks)
        return in_order(out, order_of(query), query.dtype), lse


torch.library.impl(DECODE, "CompositeExplicitAutograd")(forward)


@torch.library.register_fake(DECODE)
def _fake(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    call = unflatten_decode(options)
    check_inputs(query, key, value, call.scores.sinks)
    check_num_queries(query, MAX_QUERIES)
    check_batch(query, call.batch)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    # Compilers rely on the fake's strides, so they must be those of the implementation.
    (query,) = unit_stride(query)
    return empty(query, (*query.shape[:3], value.shape[3]), order_of(query)), lse
