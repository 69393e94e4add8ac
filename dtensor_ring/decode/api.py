"""Attention of a few new tokens to keys that are sharded over an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.compute.accumulate import add_sinks
from dtensor_ring.decode.call import (
    DECODE_LEAVES,
    MAX_QUERIES,
    SINKS,
    DecodeBatch,
    DecodeCall,
    DecodePlace,
    checked_decode,
    flatten_decode,
    unflatten_decode,
)
from dtensor_ring.decode.op import NO_GRADIENT, attend, decode_op
from dtensor_ring.decode.plan import DecodeRequest
from dtensor_ring.dtensor import call_check
from dtensor_ring.dtensor.annotation import annotation_of, axis_group, config_of_call
from dtensor_ring.dtensor.attention_options import DecodeOptions
from dtensor_ring.dtensor.dispatch import handler_of, handlers, local_rows, local_scores
from dtensor_ring.dtensor.known_calls import keep, known_calls_of
from dtensor_ring.dtensor.per_query import with_bias, with_sinks
from dtensor_ring.dtensor.placement import SEQUENCE, local_of, ring_of_keys, without, wrap
from dtensor_ring.dtensor.sdpa import Attention, others, scores_of_sdpa
from dtensor_ring.ops.checks import called_by_user, check_sinks
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.slices import Slices
from dtensor_ring.transport.transport import block_of_decoding


def merge_ranks(
    partial: Callable[[], tuple[Tensor, Tensor]],
    call: DecodeCall,
    request: DecodeRequest,
    query: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute this rank's partial result, and merge the partial results in the order of ranks.

    Args:
        partial: computes the partial result of this rank: out `(B, N, M, Hv)` and lse `(B, N, M)`,
            float32 or wider, without sinks.
        call: the options; ranks must agree on them.
        request: what the queries see; ranks must agree on it, too.
        query: `(B, N, M, H)`, the same on every rank.
        value: this rank's values `(..., Nkv, ..., Hv)`.

    Returns:
        The merged `(out, lse)`: the same bits on every rank.

    Raises:
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.
    """
    sinks = call.scores.sinks
    call_check.check_options(query, call)
    if sinks is not None:
        check_sinks(query, sinks)
    with torch.no_grad(), checked_decode(call, request, query, value) as combine:
        # Inside the context, an error of this rank is reported to the other ranks.
        out, lse = partial()
        if combine is not None:
            out, lse = combine(out, lse)
        if sinks is not None:
            lse = add_sinks(out, lse, sinks)
    return out, lse


@overload
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[DecodeOptions],
) -> Tensor: ...
@overload
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
    slices: Slices | Tensor | None = None,
    key_runs: Tensor | None = None,
    query_starts: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    kernel: str | None = None,
    mesh: DeviceMesh | None = None,
    return_lse: bool = False,
    merge: str | None = None,
    agree: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of 1 to 64 new tokens to keys and values sharded over the ranks of a mesh axis.

    This is exact softmax attention, as in flash-decoding: each rank attends to the columns that it
    holds, and one round of messages merges the partial results. Their size does not depend on the
    number of keys. All ranks get the same bits. It is for inference, and has no gradient.

    Args:
        query: `(B, N, M, H)`, the same on every rank. A DTensor is `Replicate` over the axis on
            which key and value are `Shard(2)`; on other axes it has their placements.
        key: this rank's columns `(B, Nkv, C, H)`. C may be 0, and may differ between ranks. `Nkv`
            divides `N`; key heads are not repeated.
        value: `(B, Nkv, C, Hv)`.
        mask: which keys a query sees, by position; causal by default, unless `slices` is given.
        cu_seqlens: boundaries of documents in positions, as for `ring_attention`. They may exceed
            the keys; so may slices.
        slices: what queries see, in place of mask and boundaries: `Slices`, or the tensor that
            `sequence_slices` makes of them.
        key_runs: the positions of each rank's columns: start and length of runs, `(W, R, 2)`, int32
            or int64, best on the CPU. Each row ascends, and runs of length 0 pad it. By default the
            axis's layout shards the positions from 0 on into equal shards.
        query_starts: the position of the first of the M tokens, `(1,)` or `(B,)`: rows of a batch
            may differ in length. By default the queries are at the last M positions of the keys.
        sinks: `(N,)`, one logit per query head, which takes part in the softmax without a value; or
            `(B, N, M)`, one for each query.
        relative_bias: `(B, N, M, E)`, what is added to scores by distance, as in `ring_attention`.
        scale: the factor of the scores, `H ** -0.5` by default.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 turns it off.
        kernel: the name of the block kernel; by default the axis's, else the first that can run.
        mesh: the 1-D mesh of the axis; `None` if this rank holds all keys: nothing is sent.
        return_lse: also return the log-sum-exp of the scores, natural log, `(B, N, M)`, float32
            (float64 for float64), -inf for a row that sees nothing.
        merge: "one_shot" sends the partial results to all ranks. "two_shot" merges a part of the
            rows on each rank, and sends the merged parts to all: one more round, but fewer bytes.
            By default the faster one. Where the axis has a fixed order of sums, neither is given.
        agree: integers that must be the same on all ranks, such as the token ids of this step. The
            ranks compare them in the messages that they send anyhow, and raise if they differ.

    Returns:
        `out` `(B, N, M, Hv)`, placed like the query, or `(out, lse)`: 0 and -inf for a row that
        sees no key.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if shapes, runs, boundaries, numbers or kernel do not fit.
        NotImplementedError: if an input needs a gradient while gradients are enabled.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 99, 8), torch.randn(1, 2, 99, 8)
        >>> decode_attention(q, k, v, mask=Mask.sliding(31), mesh=mesh).shape
        torch.Size([1, 4, 1, 8])
    """
    integers = cu_seqlens, None, key_runs, query_starts, agree
    asked = key_runs is None, mask, scale, softcap, kernel, merge
    is_usual = slices is relative_bias is None and are_of_heads(sinks)
    if is_usual and type(return_lse) is bool:
        known = known_options(query, key, value, mesh, integers, asked)
        if known is not None:
            before, after = known
            out, lse = called_by_user(attend, query, key, value, *integers, *before, sinks, *after)
            return (out, lse) if return_lse else out
    return_lse = call_check.as_flag("return_lse", return_lse)
    call_check.check_tensors(query, key, value)
    given = call_check.batch_of(cu_seqlens, None, None, slices)
    batch = DecodeBatch(given.cu_seqlens, given.slices, key_runs, query_starts, agree)
    place, of_axis = placed(query, mesh, key_runs is not None, merge)
    kernel = of_axis if kernel is None else kernel
    of_queries = None  # sinks of each query, which the op does not take
    if isinstance(sinks, Tensor) and sinks.ndim == 3:
        of_queries, sinks = sinks, None
    scores = call_check.scores_of(
        query, call_check.mask_of(mask, slices), scale, softcap, sinks, kernel
    )
    call = DecodeCall(batch, scores, place)
    call_check.check_options(query, call)
    if relative_bias is not None:
        query = with_bias(query, relative_bias)
    options = flatten_decode(call)
    out, lse = called_by_user(attend, query, key, value, *options)
    if is_usual and not torch.compiler.is_compiling():
        kind = place.group_name, query.dtype, query.shape[3], asked
        keep(mesh, kind, (options[len(integers) : SINKS], options[SINKS + 1 :]))
    if of_queries is not None:
        out, lse = with_sinks(query, out, lse, of_queries)
    return (out, lse) if return_lse else out


def are_of_heads(sinks: Any) -> bool:
    """Return whether sinks have one logit per head, which the op takes, or are `None`."""
    return sinks is None or (type(sinks) in (Tensor, nn.Parameter) and sinks.ndim == 1)


def known_options(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: DeviceMesh | None,
    integers: tuple[Tensor | None, ...],
    asked: tuple[Any, ...],
) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Return the op's options before and after sinks, without integers, if they were checked.

    They do not depend on shapes, other than the head dim. The op checks the tensors.
    """
    if torch.compiler.is_compiling():
        return None
    kept = known_calls_of(mesh)
    if kept is None or not type(query) is type(key) is type(value) is Tensor:
        return None
    for x in integers:
        if x is not None and (type(x) is not Tensor or x.layout is not torch.strided):
            return None
    if query.is_nested or key.is_nested or not query.ndim == key.ndim == value.ndim == 4:
        return None
    if query.shape[3] > key.shape[3]:
        return None
    group_name, calls = kept
    try:
        return calls.get((group_name, query.dtype, query.shape[3], asked))
    except TypeError:  # no option of a wrong type is known
        return None


def placed(
    query: Tensor,
    mesh: DeviceMesh | None,
    with_runs: bool,
    merge: str | None,
    unordered: str | None = None,
) -> tuple[DecodePlace, str | None]:
    """Return the place of plain tensors, and the axis's kernel; the op reads DTensors for both.

    Args:
        query: the queries.
        mesh: the mesh of the axis, or `None`.
        with_runs: whether the call has `key_runs`.
        merge: how partial results are merged.
        unordered: the name of a call whose sums have no fixed order, which is refused then.
    """
    if merge is not None and not isinstance(merge, str):
        raise TypeError(f"merge must be a name, a str, got {merge!r}")
    if isinstance(query, DTensor) and mesh is not None:
        raise ValueError(
            "mesh is for plain tensors, and query is a DTensor, which has its own; leave it out"
        )
    if mesh is None:
        return DecodePlace(merge=merge), None
    group = axis_group(mesh)
    if with_runs:  # they replace the layout
        config, layout = annotation_of(group).config_or_default, DecodePlace().layout
    else:
        config = config_of_call(group, False)
        layout = config.spec
    if unordered is not None:
        config.policy.refuse_order(unordered)
    block = block_of_decoding(config.policy)
    place = DecodePlace(layout, group_name=group.group_name, merge=merge, block=block)
    return place, config.kernel


def decode_dtensor(
    query: DTensor, key: DTensor, value: DTensor, call: DecodeCall
) -> tuple[DTensor, DTensor]:
    """Run the decode op on DTensors, whose placements and axis give the call's place."""
    batch = call.batch
    ring = ring_of_keys(query, key, value, batch.key_runs is not None)
    block = block_of_decoding(ring.config.policy)
    starts = batch.query_starts
    if starts is not None and len(starts) != 1:
        starts = local_rows("query_starts", starts, query, ring, 1)
    local = DecodeCall(
        batch._replace(
            cu_seqlens=local_rows("cu_seqlens", batch.cu_seqlens, query, ring),
            slices=local_rows("slices", batch.slices, query, ring, 3),
            query_starts=starts,
        ),
        local_scores(call.scores, query, ring),
        DecodePlace(
            layout=ring.config.spec,
            seq_len=key.shape[SEQUENCE],
            group_name=ring.group.group_name,
            merge=call.place.merge,
            block=block,
        ),
    )
    # The query is not sharded over the axis: its local tensor has all query tokens.
    tensors = query._local_tensor, local_of(key, ring), local_of(value, ring)
    out, lse = decode_op(*tensors, *flatten_decode(local))
    shape, placements = tuple(query.shape[:3]), without(ring.placements)
    return (
        wrap(out, (*shape, value.shape[3]), ring, placements),
        wrap(lse, shape, ring, placements),
    )


def _few_queries(bound: dict[str, Any]) -> Attention | None:
    """Take an aten attention over if a few replicated queries attend to sharded keys.

    Raises:
        NotImplementedError: if it needs a gradient.
        ValueError: if it drops weights.
    """
    query, key, value = bound["query"], bound["key"], bound["value"]
    if not (isinstance(query, DTensor) and isinstance(key, DTensor)):
        return None
    if (
        query.shape[SEQUENCE] > MAX_QUERIES
        or tuple(query.placements) != without(tuple(key.placements))
        or Shard(SEQUENCE) not in key.placements
    ):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise NotImplementedError(NO_GRADIENT)
    if bound["dropout_p"]:
        raise ValueError(
            f"a few queries on all ranks drop nothing, got dropout_p={bound['dropout_p']}"
        )
    # PyTorch aligns a causal mask at the first query and the first key.
    batch = DecodeBatch(query_starts=torch.zeros(1, dtype=torch.int32))
    return decode_dtensor, DecodeCall(batch, scores_of_sdpa(bound), DecodePlace())


handlers.update({decode_op: handler_of(decode_dtensor, len(DECODE_LEAVES), unflatten_decode)})
others.append(_few_queries)
