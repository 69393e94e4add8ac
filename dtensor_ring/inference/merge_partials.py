"""Merge the partial results that the ranks of an axis have for the same queries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dtensor_ring.compute.sinks import add_sinks
from dtensor_ring.dtensor.arguments import check_options
from dtensor_ring.ops.check import check_sinks
from dtensor_ring.ops.decode import agreed_decode
from dtensor_ring.ops.decode_options import DecodeCall, DecodeQuestion


def merge_partials(
    partial: Callable[[], tuple[Tensor, Tensor]],
    call: DecodeCall,
    question: DecodeQuestion,
    query: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute this rank's partial result, and merge the partial results in the order of ranks.

    Args:
        partial: computes the partial result of this rank: out `(B, N, M, Hv)` and lse `(B, N, M)`,
            float32 or wider, without sinks.
        call: the options; ranks must agree on them.
        question: what the queries see; ranks must agree on it, too.
        query: `(B, N, M, H)`, the same on every rank.
        value: this rank's values `(..., Nkv, ..., Hv)`.

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
        # Inside the context, an error of this rank is reported to the other ranks.
        out, lse = partial()
        if combine is not None:
            out, lse = combine(out, lse)
        if sinks is not None:
            lse = add_sinks(out, lse, sinks)
    return out, lse
