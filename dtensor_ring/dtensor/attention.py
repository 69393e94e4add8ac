"""The public function: ring attention on DTensors, or on local shards and a mesh."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.all_to_all.ulysses import is_exchanged, ulysses_attention
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.dtensor import call_check
from dtensor_ring.dtensor.annotation import annotation_of, axis_group, config_of_call, tag_compiled
from dtensor_ring.dtensor.attention_options import RingOptions
from dtensor_ring.dtensor.choice import chosen
from dtensor_ring.dtensor.dispatch import chosen_on_dtensors, ulysses_dtensors
from dtensor_ring.dtensor.known_calls import keep_call, known_call
from dtensor_ring.dtensor.per_query import with_bias, with_sinks
from dtensor_ring.dtensor.placement import dtensor_of, strategy_of
from dtensor_ring.ops import ring_op
from dtensor_ring.ops.checks import called_from
from dtensor_ring.ops.options import Batch, Call, Place, flatten, on_dtensors
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import AUTO, check_strategy, has_all_to_all


@overload
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    validate: bool = ...,
    **options: Unpack[RingOptions],
) -> Tensor: ...
@overload
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    validate: bool = ...,
    **options: Unpack[RingOptions],
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    kernel: str | None = None,
    mesh: DeviceMesh | None = None,
    return_lse: bool = False,
    key_cu_seqlens: Tensor | None = None,
    runs: Tensor | None = None,
    slices: Slices | Tensor | None = None,
    key_runs: Tensor | None = None,
    strategy: str | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence that is sharded over the ranks of a mesh axis.

    This is exact softmax attention (Liu et al., 2023, arXiv 2310.01889): keys and values travel
    between the ranks while each rank computes on those it has. Partial results are merged in
    float32.
    Layout, strategy and transfer policy are those of the axis, see `SequenceAxis`.

    Args:
        query: `(B, N, S, H)`, either DTensors or local shards `(B, N, L, H)` with `mesh`; for the
            `(B, S, N, H)` of flash-attn pass `x.transpose(1, 2)`, no copy. As a DTensor it is
            `Shard(2)` over exactly one mesh axis, the ring; over other axes it may be `Shard(0)`
            (batch), `Shard(1)` (heads) or `Replicate`.
        key: `(B, Nkv, S, H)`, placed as the query; `Nkv` divides `N` (grouped-query attention), and
            nothing is repeated: query head i sees key head `i // (N / Nkv)`. If its length is not
            the query's, this is cross attention.
        value: `(B, Nkv, S, Hv)`, placed as the query.
        mask: which keys a query sees; causal by default, full with `slices`.
        cu_seqlens: boundaries of packed documents in global positions, int32 or int64, shape
            `(D+1,)` or `(B, D+1)`. A query sees only its own document; tokens after the last
            boundary see nothing, and their output is 0. Best on the CPU, where the ring is planned:
            the host waits for the copy of a GPU tensor in each call.
        sinks: `(N,)`, one logit per query head, which takes part in the softmax without a value.
            The gradient of a plain tensor must be summed over the ranks: it comes from this rank's
            queries, or its heads if those are sharded. A DTensor gets a `Partial` one. Or
            `(B, N, S)`, one logit for each query, placed as the query.
        relative_bias: `(B, N, S, E)`, placed as the query: number d is added to the score of the
            key d positions before a query, after `scale` and `softcap`. Keys after it, and those E
            or more before, get nothing. It stays with the queries. By the kernel `reference`, as
            others cannot.
        scale: factor of the scores, `H ** -0.5` by default.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is none.
        kernel: name of the block kernel; by default the axis's, else the first of
            `available_kernels()` that supports the call.
        mesh: the 1-D mesh of the ring, for local shards, which have equal length unless `key_runs`
            are given. Its layout is that of its `SequenceAxis`, contiguous if there is none.
        return_lse: also return the log-sum-exp of the scores, natural log, `(B, N, S)`, float32
            (float64 for float64), -inf for a row that sees nothing. Differentiable; at a kernel's
            largest head dims by `reference`, see `docs/rounding.md`. If lse leaves a compiled
            function or a reentrant checkpoint and you do not need its gradient, return
            `lse.detach()`, which saves some of the backward pass. `merge_attention` takes both.
        key_cu_seqlens: boundaries of the keys' and values' documents, for cross attention: the
            queries of document number d see the keys of number d. The number of keys is
            arbitrary, and the mask must be full.
        runs: which tokens each rank holds, if this depends on the batch, see `sequence_runs`;
            integers like `cu_seqlens`, `(W, R, 2)`, ascending in each row. By default the layout
            of the mesh decides.
        slices: what queries see, in place of mask and boundaries: `Slices`, or under a compiler the
            tensor that `sequence_slices` makes of them, `(N, 6)` or `(B, N, 6)`.
        key_runs: the positions of each rank's local keys, such as `ShardedCache.key_runs`, in the
            form of `runs`. Then `runs` are the positions of the queries, which are the last tokens
            of the same sequence, such as a new append step. Ranks may hold any number of either, or
            none. Mask, boundaries and slices are in positions of the sequence. With slices, keys
            may be those of another sequence, such as pools of tokens, see `Slices.pools`: then
            `runs` may be left out, and the layout of the axis says where queries are.
        strategy: how this attention is made parallel, see `SequenceAxis`; by default the axis's.
            So layers with windows may use a different one.
        dropout_p: the probability that a weight is dropped after the softmax; others are divided by
            `1 - dropout_p`. The mask is a function of the seed and of the positions of query and
            key in the whole batch: the same in any layout, on any number of ranks, forward and
            backward. By the kernel `reference`, as others cannot. Local shards count their heads
            and batch rows from 0.
        dropout_seed: int64, shape `()`, the same on all ranks; by default one from the random state
            of the query's device, which ranks seed alike. A call that is repeated with the seed
            drops the same weights.
        validate: first compare this call with those of the other ranks, and raise on every rank
            if they differ; a ring could hang or be wrong. Costs a few small messages; for eager
            calls. A call that is not a ring (no sharded sequence, a mesh of several axes) raises on
            its own rank only; the others still wait.

    Returns:
        `out` `(B, N, S, Hv)`, placed as the query, or `(out, lse)`.

    Raises:
        TypeError: if an argument has a wrong type, or DTensors and tensors are mixed.
        ValueError: if the shapes, placements, boundaries, numbers or kernel do not allow it.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> q, k, v = (shard_sequence(torch.randn(1, 2, 8, 4), mesh, 2) for _ in range(3))
        >>> ring_attention(q, k, v, mask=Mask.sliding(3)).shape
        torch.Size([1, 2, 8, 4])
    """
    is_usual = cu_seqlens is key_cu_seqlens is runs is slices is key_runs is sinks is None
    is_usual = is_usual and relative_bias is None
    asked = mask, scale, softcap, kernel, strategy
    # A call like one that was checked before runs at once.
    if is_usual and type(return_lse) is bool and not (validate or dropout_p):
        known = known_call(query, key, value, mesh, asked)
        if known is not None:
            attend_bound = ring_op.attend_bound
            return called_from(sys._getframe(), attend_bound, known, query, key, value, return_lse)
    if type(return_lse) is not bool or type(validate) is not bool:
        return_lse = call_check.as_flag("return_lse", return_lse)
        validate = call_check.as_flag("validate", validate)
    mask = call_check.mask_of(mask, slices)
    batch = call_check.batch_of(cu_seqlens, key_cu_seqlens, runs, slices, key_runs)
    how = {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
    score = partial(call_check.scores_of, query, mask, scale, softcap, sinks, **how)
    build = partial(_call_of, query, key, value, mesh, batch, strategy, kernel, score)
    call = call_check.validated(build, query, key, value, mesh) if validate else build()
    if relative_bias is not None:
        query = with_bias(query, relative_bias)
    out, lse = attend(query, key, value, call, return_lse)
    # Only a call that ran is kept: one that raises is checked, and raises, each time.
    if is_usual and not dropout_p:
        keep_call(call, query, key, value, mesh, asked)
    return out if lse is None or not return_lse else (out, lse)


def _call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: DeviceMesh | None,
    batch: Batch,
    strategy: str | None,
    kernel: str | None,
    score: Callable[[str | None], Scores],
) -> Call:
    """Check the options of a call, and collect them; `score` collects those of the scores."""
    call_check.check_tensors(query, key, value)
    if strategy is not None:
        check_strategy(strategy)
    place, of_axis = placed_shards(query, key, mesh, batch, strategy)
    return Call(batch, score(of_axis if kernel is None else kernel), place)


def attend(
    query: Tensor, key: Tensor, value: Tensor, call: Call, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return `(out, lse)` of a call, after a check of the kinds of its tensors."""
    call_check.check_options(query, call)
    sinks = call.scores.sinks
    if sinks is not None and sinks.ndim == 3:  # of each query, which the op does not take
        plain = call._replace(scores=call.scores._replace(sinks=None))
        out, lse = attend(query, key, value, plain, with_lse=True)
        return with_sinks(query, out, lse, sinks)
    if torch.compiler.is_compiling():
        tag_compiled()  # other calls do this when they look up the group
        return _attend(query, key, value, call, with_lse)
    return called_from(sys._getframe(1), _attend, query, key, value, call, with_lse)


def _attend(
    query: Any, key: Any, value: Any, call: Call, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    place = call.place
    if place.group_name is not None:
        call = chosen(call, query, value)
        if is_exchanged(call):
            return ulysses_attention(query, key, value, call, with_lse)
    # A compiler cannot trace how DTensors are read, and transforms of `torch.func` wrap them. In
    # both cases the op's DTensor handler does it.
    elif not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()):
        strategy = place.strategy or strategy_of(query)
        if strategy == AUTO:
            call = chosen_on_dtensors(query, key, value, call)
            strategy = call.place.strategy
        if strategy is not None and has_all_to_all(strategy):
            return ulysses_dtensors(query, key, value, call, with_lse)
    return ring_op.attend(query, key, value, flatten(call))


def placed_shards(
    query: Tensor, key: Tensor, mesh: DeviceMesh | None, batch: Batch, strategy: str | None
) -> tuple[Place, str | None]:
    """Return the place of local shards and the axis's kernel; for DTensors the op finds both."""
    if dtensor_of(query) is not None:
        if mesh is not None:
            raise ValueError(
                "mesh is for local tensors, and query is a DTensor, which has its own; leave it out"
            )
        return on_dtensors(strategy), None
    if mesh is None:
        raise ValueError(
            "query is a plain tensor, so the call needs mesh=, the 1-D mesh that it is a shard "
            "over; or pass DTensors, see shard_sequence"
        )
    group = axis_group(mesh)
    if batch.key_runs is not None and batch.runs is not None:  # the layout is not used
        config = annotation_of(group).config_or_default
        return config.place(group.group_name, None, None, strategy), config.kernel
    config, size = config_of_call(group, batch.runs is not None), group.size()
    # As if all shards were as long as this one; the plan refuses them if they are not.
    num_queries, num_keys = query.shape[2] * size, key.shape[2] * size
    place = config.place(group.group_name, num_queries, num_keys, strategy)
    return place, config.kernel
