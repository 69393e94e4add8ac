"""The decode op: options, schema, implementation, fake kernel, call record and flops."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from dtensor_ring.compute.accumulate import RunningOutput, add_sinks
from dtensor_ring.compute.execute import Pair, forward_step
from dtensor_ring.compute.kernels import Kernel, Scores
from dtensor_ring.compute.lags import Lags, is_biased, resident_positions
from dtensor_ring.compute.memory import empty, in_order, order_of
from dtensor_ring.compute.sole import Sole, sole_forward
from dtensor_ring.compute.trace import Label
from dtensor_ring.decode.call import (
    DECODE_SCHEMA,
    MAX_QUERIES,
    SINKS,
    BoundDecode,
    Ready,
    bound_decode,
    unflatten_decode,
)
from dtensor_ring.decode.in_blocks import decode_in_blocks, decode_pieces
from dtensor_ring.decode.plan import DecodeRequest
from dtensor_ring.decode.run import Combine
from dtensor_ring.ops import nodes
from dtensor_ring.ops.checks import (
    CALLER,
    check_head_dims,
    check_inputs,
    check_num_queries,
    loadable,
    unit_stride,
)
from dtensor_ring.ops.ring_op import check_batch, number_of
from dtensor_ring.planning.plan import Step


def forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Run the decode op on plain tensors."""
    bound = bound_decode(options, query, key, value)
    round = bound.checked(query, CALLER.frame)
    out, lse = run_bound(bound, round, None, query, key, value, options[SINKS])
    assert lse is not None
    return out, lse


def run_bound(
    bound: BoundDecode,
    round: AbstractContextManager[Combine | None],
    ready: Ready | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    needs_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Run a call whose inputs were checked on plain tensors.

    Args:
        bound: the call.
        round: its messages.
        ready: what runs it, if that is known.
        query: `(B, N, M, H)`, likewise key and value of this rank.
        key: `(B, Nkv, C, H)`.
        value: `(B, Nkv, C, Hv)`.
        sinks: `(N,)`.
        needs_lse: whether the caller reads the lse, which is `None` otherwise, or maybe is.
    """
    call, request = bound.call, bound.request
    scores = call.scores if sinks is None else call.scores._replace(sinks=sinks)
    with round as combine:
        # Within the context: an error of this rank is reported to the others.
        step, kernel, sole = ready or bound.ready(query, key, value)
        query, key, value = loadable(query, key, value)
        if sole is not None:
            if combine is None and sinks is None:
                return sole_forward(query, (key, value), sole, kernel, scores)
            found = sole.run(query, (key, value), kernel, scores)
            if combine is not None and sinks is None and not needs_lse:
                with sole.forward("merge"):
                    return _merged(query, found, combine, sole), None
            return _combined(query, found, combine, sinks, step.source)
        if call.place.block is None:
            lags = _lags(request, step, query) if is_biased(query, key) else None
            return decode(query, (key, value), step, kernel, scores, combine, lags)
        check_head_dims(query, key, value)  # a fixed order has no bias by distance
        pieces, kv = decode_pieces(call.place.block, request), (key, value)
        return decode_in_blocks(query, kv, step, pieces, kernel, scores, combine)


def _lags(request: DecodeRequest, step: Step, query: Tensor) -> Lags:
    """Return the positions of the queries and of this rank's keys, for a bias by distance."""
    if len(request.starts) > 1:
        raise ValueError(
            "relative_bias is for queries at the same positions in all batch rows, got "
            f"query_starts {list(request.starts)}"
        )
    begin = request.starts[0]
    rows = torch.arange(begin, begin + request.num_queries, device=query.device)
    runs = request.layout.runs(request.rank, request.world_size, request.seq_len)
    return Lags(rows, resident_positions(runs, step.cols, query.device))


def decode(
    query: Tensor,
    kv: Pair,
    step: Step,
    kernel: Kernel,
    scores: Scores,
    combine: Combine | None,
    lags: Lags | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of the queries over the columns of all ranks.

    Args:
        query: `(B, N, M, H)`, the same on every rank.
        kv: keys and values that this rank holds.
        step: this rank's step, with the tiles that the queries see.
        kernel: the block kernel.
        scores: how a query scores a key.
        combine: merges the partial results of the ranks; `None` if this rank has all keys.
        lags: the positions of queries and keys, if queries have a bias by distance.
    """
    label, value_head_dim = Label("decode", 0, step.source), kv[1].shape[3]
    if combine is None:
        running = RunningOutput(query, value_head_dim, scores.sinks)
    else:
        # Partials stay wide: the result is rounded once, after the last merge and the sinks.
        wide = torch.promote_types(query.dtype, torch.float32)
        running = RunningOutput(query, value_head_dim, dtype=wide)
    # Without segments: a varlen kernel packs the batch into one dim, which would copy the keys.
    how = running, kernel, scores, label
    forward_step(step, query, kv, *how, joins_tiles=False, lags=lags)
    found = running.result()
    if combine is None:
        return found
    return _combined(query, found, combine, scores.sinks, step.source)


def _combined(
    query: Tensor,
    found: tuple[Tensor, Tensor],
    combine: Combine | None,
    sinks: Tensor | None,
    source: int,
) -> tuple[Tensor, Tensor]:
    """Return the merged `(out, lse)` of all ranks, of which this rank has found its own part.

    Without `combine` this rank has all of it.
    """
    out, lse = found
    with Label("decode", 0, source)("merge"):
        # The message has the same bytes on all ranks, whatever their kernels return.
        out = out.to(torch.promote_types(query.dtype, torch.float32))
        if combine is not None:
            out, lse = combine(out, lse)
        if sinks is not None:
            lse = add_sinks(out, lse, sinks)
        return in_order(out, order_of(query), query.dtype), lse


def _merged(query: Tensor, found: tuple[Tensor, Tensor], combine: Combine, sole: Sole) -> Tensor:
    """Return the output of `_combined`; `sole` knows the memory order of outputs."""
    out = combine.output(found[0], found[1], sole.wide)
    is_like = out.dtype == query.dtype
    return sole.output(out, query) if is_like else in_order(out, order_of(query), query.dtype)


def _fake(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    call = unflatten_decode(options)
    check_inputs(query, key, value, call.scores.sinks, may_be_biased=True)
    check_num_queries(query, MAX_QUERIES)
    check_batch(query, call.batch)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    # Compilers rely on the fake's strides, so they must be those of the implementation.
    (query,) = unit_stride(query)
    return empty(query, (*query.shape[:3], value.shape[3]), order_of(query)), lse


NO_GRADIENT = (
    "decode_attention has no gradient, and one of query, key, value and sinks needs one; call it "
    "within torch.no_grad(), or train with ring_attention"
)


def _without_gradient(
    keyset: Any, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Run the decode op, which has no gradient."""
    _refuse_gradients(query, key, value, options[SINKS])
    return nodes.below_autograd(decode_op, forward, keyset, query, key, value, *options)


def _refuse_gradients(*inputs: Tensor | None) -> None:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        raise NotImplementedError(NO_GRADIENT)
    if forward_ad._current_level >= 0:
        nodes.refuse_tangents(inputs)


def attend(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Run the decode op: by the dispatcher, unless that would only convert the arguments."""
    sinks = options[SINKS]
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    if torch.compiler.is_compiling() or not nodes.is_plain(*inputs):
        return decode_op(query, key, value, *options)
    _refuse_gradients(*inputs)
    with torch._C._AutoDispatchBelowADInplaceOrView():  # see `nodes.below_autograd`
        return forward(query, key, value, *options)


def _decode_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> int:
    """Count two products over the keys of this rank, or for DTensors over those of all ranks.

    A compiler knows only lengths, so there every query sees every key.
    """
    call = unflatten_decode(rest)
    batch, heads, num_queries = map(number_of, query.shape[:3])
    pairs = batch * num_queries * number_of(key.shape[2])
    runs = call.batch.key_runs
    # Runs of several ranks without a group mean DTensors, whose group only the handler knows.
    is_whole = runs is None or len(runs) == 1
    is_known = not any(isinstance(x, FakeTensor) for x in (query, *call.batch))
    if is_known and (is_whole or call.place.group_name is not None):
        tiles = call.request(query, key).step(key.shape[2]).tiles
        pairs = sum(tile.area * (batch if tile.batch is None else 1) for tile in tiles)
    return 2 * heads * pairs * (number_of(key.shape[3]) + number_of(value.shape[3]))


decode_op = nodes.register_op(
    "decode_attention",
    f"(Tensor query, Tensor key, Tensor value, {DECODE_SCHEMA}) -> (Tensor out, Tensor lse)",
    forward,
    _fake,
    autograd=_without_gradient,
    num_cast=3,
    flops=_decode_flops,
)
