"""What users call: `select_keys`, and `selected_attention` to the keys that it found."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_ring.dtensor import call_check
from dtensor_ring.dtensor.annotation import tag_compiled
from dtensor_ring.dtensor.attention import placed_shards
from dtensor_ring.dtensor.dispatch import (
    handlers,
    local_call,
    placements_of_sinks_gradient,
    ring_of_call,
)
from dtensor_ring.dtensor.placement import HEADS, Ring, local_of, placements_text, wrap
from dtensor_ring.ops.checks import called_by_user
from dtensor_ring.ops.options import Batch, Call, Place, flatten, unflatten
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import CAUSAL, FULL
from dtensor_ring.selected.op import select_op, selected_backward_op, selected_op
from dtensor_ring.selected.plan import KEY_ROUTES, MAX_SELECTED, checked_choice


def select_keys(
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor | None,
    k: int,
    *,
    scale: float = 1.0,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
    slices: Slices | Tensor | None = None,
    runs: Tensor | None = None,
    key_runs: Tensor | None = None,
    seq_len: int | None = None,
    route: str | None = None,
    block_size: int = 1,
    local_blocks: int = 0,
    pool_size: int = 1,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """Find the k best keys of each query of a sharded sequence, by the scores of an indexer.

    The score of a key is `sum_h weights[h] * relu(scale * index_query[h] . index_key)`, in float32
    or wider (DeepSeek-AI, 2025, "DeepSeek-V3.2", equation 1). Of equal scores the lower position
    wins; `torch.topk` leaves that open. Index keys travel, a few scores at a time are kept, and the
    best keys so far: memory grows with the local queries, whatever the length of the sequence.
    The result is the same as on one process. It has no gradient.

    Args:
        index_query: `(B, S, Hi, Di)`, as DTensors that are `Shard(1)` over one axis, or this rank's
            shard `(B, L, Hi, Di)` with `mesh`.
        index_key: `(B, S, Di)`, likewise, one head; in the dtype of the queries, or a narrower one,
            in which it travels.
        weights: `(B, S, Hi)`, likewise. With `None` each index head selects its own keys, by plain
            dot products.
        k: the number of keys, or of blocks, of a query.
        scale: a factor of the products, before the relu.
        mask: which keys a query sees; causal by default, full with `slices`.
        cu_seqlens: boundaries of documents, see `ring_attention`.
        slices: what queries see, in place of mask and boundaries.
        runs: which tokens each rank holds, if this depends on the batch.
        key_runs: the positions of each rank's keys, see `ring_attention`.
        seq_len: S of local shards, if ranks hold different numbers of tokens.
        route: how index keys travel, "ring" by default, or "around", "direct" or "all_gather".
        block_size: the number of positions that compete as one, by the best that a query sees, and
            are chosen together; 1 is a key by itself (MoBA, Lu et al., 2025, arXiv 2502.13189).
        local_blocks: how many blocks up to that of a query are always among its k.
        pool_size: the number of tokens of an index key. Key n is then a pool of those from position
            `n * pool_size` on, on the rank that has the last of them, as `pool_tokens` makes them
            (`(B, P, Di)`). A query sees the pools that end at or before it, and chooses k of these.
            It always gets the tokens after them, up to itself. For causal local shards.
        mesh: the 1-D mesh of the axis, for local shards.

    Returns:
        Positions in the sharded sequence, int32: `(B, S, k * block_size)`, or without weights
        `(B, Hi, S, k * block_size)`. They ascend, and end with -1 where a query sees fewer keys.
        Of pools there are up to `k * pool_size + pool_size - 1`.

    Raises:
        TypeError: if an argument has a wrong type, or DTensors and tensors are mixed.
        ValueError: if the shapes, placements, boundaries or numbers do not allow it.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> query, key = torch.ones(1, 4, 2, 8), torch.ones(1, 4, 8)
        >>> select_keys(query, key, torch.ones(1, 4, 2), 2, mesh=mesh).tolist()
        [[[0, -1], [0, 1], [0, 1], [0, 1]]]
    """
    call_check.check_dims("index_query", index_query, 4, "(B, L, Hi, Di)")
    call_check.check_dims("index_key", index_key, 3, "(B, L, Di)")
    # Ops take heads before tokens, and an index key is one head for all heads of queries.
    query, key = index_query.transpose(1, 2), index_key.unsqueeze(1)
    if weights is not None:
        call_check.check_dims("weights", weights, 3, "(B, L, Hi)")
        weights = weights.transpose(1, 2)
    choice = checked_choice(k, block_size, local_blocks, pool_size)
    mask = call_check.mask_of(mask, slices)
    batch = call_check.batch_of(cu_seqlens, None, runs, slices, key_runs)
    check_pools_seen(choice[3], mask, batch)
    scores = call_check.scores_of(query, mask, scale, 0.0, None, None)
    place = _placed_call(query, key, mesh, batch, _route(route), seq_len)
    place = of_tokens(place, choice[3])
    call = Call(batch, scores, place)
    call_check.check_options(query, call)
    arguments = query, key, weights, *choice, *flatten(call)
    found = called_by_user(select_op, *arguments)
    return found if weights is None else found.squeeze(1)


@overload
def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | int,
    selected: Tensor,
    *,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    runs: Tensor | None = ...,
    key_runs: Tensor | None = ...,
    seq_len: int | None = ...,
    route: str | None = ...,
    pool_size: int = ...,
    return_lse: Literal[False] = ...,
    mesh: DeviceMesh | None = ...,
) -> Tensor: ...
@overload
def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | int,
    selected: Tensor,
    *,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    runs: Tensor | None = ...,
    key_runs: Tensor | None = ...,
    seq_len: int | None = ...,
    route: str | None = ...,
    pool_size: int = ...,
    return_lse: Literal[True],
    mesh: DeviceMesh | None = ...,
) -> tuple[Tensor, Tensor]: ...
def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | int,
    selected: Tensor,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    runs: Tensor | None = None,
    key_runs: Tensor | None = None,
    seq_len: int | None = None,
    route: str | None = None,
    pool_size: int = 1,
    return_lse: bool = False,
    mesh: DeviceMesh | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query to the keys that it selected, over a sharded sequence.

    Only keys travel that a query of another rank selected. Each rank asks the others for them, with
    one bit for each of their keys, and in backward their gradients go home and are added up. Exact
    softmax attention over the selected keys, in float32 or wider, by chunks of queries.

    There is no mask: what is selected is attended to. `select_keys` selects what a mask shows.

    Args:
        query: `(B, N, S, H)`, as DTensors that are `Shard(2)` over one axis, or this rank's shard
            `(B, N, L, H)` with `mesh`.
        key: `(B, Nkv, S, H)`, likewise; `Nkv` divides N.
        value: `(B, Nkv, S, Hv)`, likewise. Or the number Hv: then the first Hv numbers of a key are
            its value, and travel once, as the latents of multi-head latent attention
            (DeepSeek-AI, 2024, arXiv 2405.04434).
        selected: int32 positions `(B, S, K)` for all heads, or `(B, G, S, K)`, where group g is for
            the key heads of the g-th part. In any order, none twice; -1 for none.
        scale: a factor of the scores, `H ** -0.5` by default.
        sinks: `(N,)`, one logit for each query head, which takes part in the softmax without a
            value; its gradient is as in `ring_attention`.
        runs: which tokens each rank holds, if this depends on the batch.
        key_runs: the positions of each rank's keys, see `ring_attention`.
        seq_len: S of local shards, if ranks hold different numbers of tokens.
        route: "selected": keys that are asked for travel. "all": all of them do, which saves the
            requests. By default "all" if K is nearly S.
        pool_size: the number of tokens of a key: keys are then pools, `(B, Nkv, P, H)`, where the
            last token of each is, and `selected` has their numbers, see `select_keys`. For local
            shards.
        return_lse: also return the log-sum-exp of the scores, `(B, N, S)`, float32 or wider, -inf
            for a query without keys.
        mesh: the 1-D mesh of the axis, for local shards.

    Returns:
        `out` `(B, N, S, Hv)`, placed as the query, 0 for a query without keys; or `(out, lse)`.

    Raises:
        TypeError: if an argument has a wrong type, or DTensors and tensors are mixed.
        ValueError: if the shapes, placements or positions do not allow it.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> query, latents = torch.randn(1, 4, 6, 8), torch.randn(1, 1, 6, 8)
        >>> selected = torch.tensor([[[0, -1], [0, 1], [0, 2], [1, 3], [1, 4], [0, 5]]]).int()
        >>> selected_attention(query, latents, 6, selected, mesh=mesh).shape
        torch.Size([1, 4, 6, 6])
    """
    return_lse = call_check.as_flag("return_lse", return_lse)
    call_check.check_dims("query", query, 4, "(B, N, L, H)")
    call_check.check_dims("key", key, 4, "(B, Nkv, L, H)")
    if not isinstance(selected, Tensor):
        raise TypeError(f"selected must be a tensor of positions, got {type(selected).__name__}")
    selected = selected.unsqueeze(1) if selected.ndim == 3 else selected
    rows, values = _rows(key, value)
    batch = call_check.batch_of(None, None, runs, None, key_runs)
    scores = call_check.scores_of(query, FULL, scale, 0.0, sinks, None)
    place = _placed_call(query, key, mesh, batch, Strategy.default, seq_len)
    pool_size = as_count("pool_size", pool_size, 1, MAX_SELECTED)
    place = of_tokens(place, pool_size)
    call = Call(batch, scores, place)
    call_check.check_options(query, call)
    if route is not None and not (isinstance(route, str) and route in KEY_ROUTES):
        raise ValueError(f"route must be one of {', '.join(KEY_ROUTES)}, or None, got {route!r}")
    begin, end = values
    out, lse = called_by_user(
        selected_op, query, rows, selected, begin, end, route, pool_size, *flatten(call)
    )
    return (out, lse) if return_lse else out


def _rows(key: Tensor, value: Tensor | int) -> tuple[Tensor, tuple[int, int]]:
    """Return keys and values side by side, and the span of the values."""
    if isinstance(value, Tensor):
        call_check.check_dims("value", value, 4, "(B, Nkv, L, Hv)")
        if isinstance(key, DTensor) != isinstance(value, DTensor):
            raise TypeError(
                f"key and value must both be DTensors, or none of them, got "
                f"{type(key).__name__} and {type(value).__name__}"
            )
        if value.shape[:3] != key.shape[:3] or value.dtype != key.dtype:
            raise ValueError(
                f"value must have the batch, heads, tokens and dtype of key, {tuple(key.shape)} "
                f"{key.dtype}, got {tuple(value.shape)} {value.dtype}"
            )
        # Side by side, so that one read of a row brings a key with its value.
        return torch.cat((key, value), -1), (key.shape[3], key.shape[3] + value.shape[3])
    return key, (0, as_count("value", value, 1, key.shape[3]))


def check_pools_seen(pool_size: int, mask: Mask, batch: Any) -> None:
    """Refuse pools that a query does not see by where they end.

    Raises:
        ValueError: saying what was given.
    """
    if pool_size > 1 and (
        mask != CAUSAL or batch.cu_seqlens is not None or batch.slices is not None
    ):
        given = "slices" if batch.slices is not None else "cu_seqlens"
        given = given if mask == CAUSAL or batch.slices is not None else str(mask)
        raise ValueError(
            f"pool_size={pool_size} is for a causal sequence of one document, whose pools count "
            f"from its first token; got {given}"
        )


def _route(route: str | None) -> str:
    if route is None:
        return Strategy.default
    if not isinstance(route, str) or route not in ROUTES:
        raise ValueError(f"route must be one of {', '.join(ROUTES)}, or None, got {route!r}")
    return route


def _placed_call(
    query: Tensor,
    key: Tensor,
    mesh: DeviceMesh | None,
    batch: Batch,
    strategy: str,
    seq_len: int | None,
) -> Place:
    """Return the place of local shards; DTensors have it themselves."""
    place, _ = placed_shards(query, key, mesh, batch, strategy)
    if place.group_name is None:
        if seq_len is not None:
            raise ValueError("seq_len is for local shards, and query is a DTensor; leave it out")
        if torch.compiler.is_compiling():
            tag_compiled()  # other calls do this when they look up the group
    elif seq_len is not None and batch.key_runs is None:
        length = as_count("seq_len", seq_len)
        place = place._replace(seq_len=length, key_seq_len=length)
    return place


def of_tokens(place: Place, pool_size: int) -> Place:
    """Return the place of local shards whose keys may be pools: these follow from the tokens."""
    if pool_size > 1 and place.group_name is not None:
        return place._replace(key_seq_len=place.seq_len)
    return place


def _local(call: Call, query: Any, key: Any, ring: Ring) -> tuple[Any, ...]:
    """Return the options on local tensors; the strategy stays that of the call."""
    local = local_call(call, query, key, key, ring)
    return flatten(local._replace(place=local.place._replace(strategy=call.place.strategy)))


def _select(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    query, key, weights, *choice = args[:7]
    call = unflatten(args[7:])
    refuse_pools(choice[3])
    ring = ring_of_call(query, key, key, call)
    if Shard(HEADS) in ring.placements:
        raise ValueError(
            "an indexer sums over its heads, so they must be Replicate, got query "
            f"({placements_text(ring.placements)})"
        )
    tensors = [local_of(x, ring) for x in (query, key, weights)]
    found = select_op(*tensors, *choice, *_local(call, query, key, ring))
    batch, heads, num_queries, _ = query.shape
    shape = batch, heads if weights is None else 1, num_queries, found.shape[3]
    return wrap(found, shape, ring)


def refuse_pools(pool_size: int) -> None:
    """Refuse pools as DTensors.

    Raises:
        ValueError: saying what to pass.
    """
    if pool_size > 1:
        raise ValueError(
            f"pool_size={pool_size} is for local shards, as ranks have different numbers of pools; "
            "pass them with mesh="
        )


def _attend(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    query, rows, selected, *how = args[:7]
    call = unflatten(args[7:])
    refuse_pools(how[3])
    ring = ring_of_call(query, rows, rows, call)
    local = [local_of(query, ring), local_of(rows, ring), _selected(selected, ring)]
    out, lse = selected_op(*local, *how, *_local(call, query, rows, ring))
    shape = tuple(query.shape[:3])
    return wrap(out, (*shape, how[1] - how[0]), ring), wrap(lse, shape, ring)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    grad_out, grad_lse, query, rows, selected, *how = args[:9]
    out, lse, call = args[9], args[10], unflatten(args[11:])
    ring = ring_of_call(query, rows, rows, call)
    grads = [local_of(x, ring) for x in (grad_out, grad_lse)]
    local = [local_of(query, ring), local_of(rows, ring), _selected(selected, ring)]
    saved = local_of(out, ring), local_of(lse, ring)
    options = _local(call, query, rows, ring)
    grad_query, grad_rows, of_sinks = selected_backward_op(*grads, *local, *how, *saved, *options)
    sinks: Any = call.scores.sinks
    if isinstance(sinks, DTensor):
        of_sinks = wrap(
            of_sinks, tuple(sinks.shape), ring, placements_of_sinks_gradient(sinks, ring)
        )
    wrapped = [
        wrap(grad, tuple(x.shape), ring) for grad, x in ((grad_query, query), (grad_rows, rows))
    ]
    return *wrapped, of_sinks


def _selected(selected: Any, ring: Ring) -> Any:
    """Return the local lists; one list for all heads is the same wherever heads are sharded."""
    if not isinstance(selected, DTensor):
        raise TypeError(
            f"selected must be a DTensor as query is, got {type(selected).__name__}; select_keys "
            "returns one for DTensors"
        )
    places = ring.placements
    if selected.shape[1] == 1:
        places = tuple(Replicate() if where == Shard(HEADS) else where for where in places)
    if tuple(selected.placements) != places:
        selected = selected.redistribute(ring.mesh, places)
    return selected._local_tensor


handlers.update({select_op: _select, selected_op: _attend, selected_backward_op: _backward})
