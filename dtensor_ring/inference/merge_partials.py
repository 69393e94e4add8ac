"""Attentions of the same queries on all ranks of an axis, as one that all ranks have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dtensor_ring.compute.sinks import add_sinks
from dtensor_ring.dtensor.arguments import check_options
from dtensor_ring.ops.check import check_sinks
from dtensor_ring.ops.decode_options import DecodeCall, DecodeQuestion
from dtensor_ring.ops.word import agreed_decode


def merge_partials(
    partial: Callable[[], tuple[Tensor, Tensor]],
    call: DecodeCall,
    question: DecodeQuestion,
    query: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merge the partial results of all ranks, in their order, by one round of messages.

    Args:
        partial: computes that of this rank: out `(B, N, M, Hv)` and its log-sum-exp `(B, N, M)`,
            float32 or wider, without sinks.
        call: the options, on which ranks have to agree.
        question: what the queries see, on which they have to agree, too.
        query: `(B, N, M, H)`, the same on every rank.
        value: `(..., Nkv, ..., Hv)` of this rank.

    Returns:
        The merged `(out, lse)`: the same bits on every rank.

    Raises:
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.
    """
    sinks = call.scores.sinks
    check_options(query, call)
    if sinks is not None:
        check_sinks(query, sinks)
    with torch.no_grad(), agreed_decode(call, question, query, value) as combine:
        # Within the context: what one rank refuses, or has no memory for, is told to the others.
        out, lse = partial()
        if combine is not None:
            out, lse = combine(out, lse)
        if sinks is not None:
            lse = add_sinks(out, lse, sinks)
    return out, lse
