"""The ops of attention that selects its keys: schemas, implementations, gradient, records."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.agreement.call_record import MAX_BYTES, CallRecord
from dtensor_ring.agreement.checked_transport import TransportContext, checked_transport
from dtensor_ring.agreement.group_state import group_state_of
from dtensor_ring.compute.accumulate import sinks_gradient
from dtensor_ring.compute.kernels import Saved
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty, order_of
from dtensor_ring.ops import nodes
from dtensor_ring.ops.attention_record import AttentionFacts, attention_facts, record_of, runs_text
from dtensor_ring.ops.checks import CALLER, check_inputs, unit_stride, warn_of_tiles
from dtensor_ring.ops.options import LEAVES, SCHEMA, Call, PlanRequest, unflatten
from dtensor_ring.ops.ring_op import check_batch, number_of
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.plan import checked_slices
from dtensor_ring.planning.run_table import shard_table
from dtensor_ring.planning.tile import FULL
from dtensor_ring.selected.moved_keys import SelectedKeys, selected_backward, selected_forward
from dtensor_ring.selected.plan import (
    SELECTED,
    KeyPositions,
    key_positions,
    key_route,
    pool_numbers,
    width_of,
)
from dtensor_ring.selected.run import (
    IndexQueries,
    KeyChoice,
    ring_select,
    tokens_of_blocks,
    tokens_of_pools,
)
from dtensor_ring.transport.transport import transport_of

_LISTED = "Tensor selected, int value_begin, int value_end, str? route, int pool_size"


class Listed(NamedTuple):
    """Which keys queries selected, and where the values of rows are.

    Attributes:
        selected: int32 `(B, G, L, K)`, -1 for none.
        value_begin: index of the first number of a value in a row.
        value_end: index after the last.
        route: "selected" or "all"; `None` until the number of all keys is known.
        pool_size: tokens of a key; 1 if each token has its own.
    """

    selected: Tensor
    value_begin: int
    value_end: int
    route: str | None
    pool_size: int

    def routed(self, request: PlanRequest) -> Listed:
        """Return this with a route, which all ranks choose alike."""
        # Ranks may hold different numbers of keys, so only that of all keys may decide.
        route = key_route(self.route, self.selected.shape[-1], request.key_seq_len)
        return self._replace(route=route)

    def key_and_value(self, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the keys and the values in rows `(B, Nkv, C, D)`."""
        return rows[..., : query.shape[3]], rows[..., self.value_begin : self.value_end]


def positions_of_keys(request: PlanRequest) -> KeyPositions:
    """Return the positions of the keys of all ranks."""
    layout = request.key_layout or request.layout
    return key_positions(layout, request.world_size, request.key_seq_len)


def select(
    query: Tensor,
    key: Tensor,
    weights: Tensor | None,
    k: int,
    block_size: int,
    local_blocks: int,
    pool_size: int,
    *options: Any,
) -> Tensor:
    """Run the selection op on plain tensors, see `select_keys`: positions, `(B, G, L, width)`."""
    call = unflatten(options)
    check_index(query, key, weights)
    call.place.policy.refuse_order("attention to selected keys")
    request = request_of_keys(call.request(query.shape[0]), pool_size)
    choice = KeyChoice(k, call.scores.scale, block_size, local_blocks, pool_size)
    own: dict[str, object] = {"weights": weights is not None, "choice": tuple(choice)}
    own["index keys"] = key.dtype
    with _checked("select keys", call, request, (query, key), own) as transport:
        # Within the context: an error of this rank is reported to the others.
        plan = request.plan(query, key)
        warn_of_tiles(plan, request)
        places = key_positions(request.layout, request.world_size, request.seq_len)
        on_host = places.of(request.rank)
        # A copy, since the cached positions are read-only, of which torch cannot make a tensor.
        of_rows = torch.from_numpy(on_host.copy()).to(query.device)
        queries = IndexQueries(query, weights, of_rows, on_host)
        chosen = ring_select(queries, key, plan, choice, positions_of_keys(request), transport)
    # The loop chose numbers of pools or of blocks, and attention takes positions of tokens.
    if pool_size > 1:
        return tokens_of_pools(chosen, pool_size, of_rows)
    if block_size == 1:
        return chosen
    shards = shard_table(request.layout, request.world_size, request.seq_len).shards
    seen = _slices(request)
    return tokens_of_blocks(chosen, block_size, of_rows, shards[request.rank], seen)


def request_of_keys(request: PlanRequest, pool_size: int) -> PlanRequest:
    """Return the request of a selection whose keys may be pools of the tokens in `request`."""
    if pool_size == 1:
        return request
    tokens = request.key_layout or request.layout
    pools = pool_numbers(tokens, request.world_size, request.key_seq_len, pool_size)
    # A rank gets all pools; which of them a query sees is told by their numbers.
    return request._replace(mask=FULL, key_layout=pools, key_seq_len=pools.end, documents=None)


def _slices(request: PlanRequest) -> Any:
    """Return the slices that queries see."""
    return checked_slices(
        request.mask,
        request.world_size,
        (request.seq_len, request.key_seq_len),
        request.documents,
        request.key_documents,
        request.slices,
    )


def _fake_select(
    query: Tensor,
    key: Tensor,
    weights: Tensor | None,
    k: int,
    block_size: int,
    local_blocks: int,
    pool_size: int,
    *options: Any,
) -> Tensor:
    check_index(query, key, weights)
    check_batch(query, unflatten(options).batch)
    return no_keys(query, weights, width_of(k, block_size, pool_size))


def no_keys(query: Tensor, weights: Tensor | None, width: int) -> Tensor:
    """Return lists of keys of queries without content: one, or one of each head if none weighs."""
    batch, heads, num_queries, _ = query.shape
    groups = heads if weights is None else 1
    return query.new_empty(batch, groups, num_queries, width, dtype=torch.int32)


def check_index(query: Tensor, key: Tensor, weights: Tensor | None) -> None:
    """Refuse tensors of an indexer that do not fit.

    Raises:
        ValueError: says what was given.
    """
    if query.device != key.device:
        raise ValueError(
            f"index_query and index_key must be on one device, got {query.device} and "
            f"{key.device}; use .to()"
        )
    if torch.promote_types(query.dtype, key.dtype) != query.dtype:
        raise ValueError(
            "index_key must have the dtype of index_query, or a narrower one in which it travels, "
            f"got {key.dtype} and {query.dtype}; use .to()"
        )
    check_inputs(query, key, key, None, may_be_narrow=True)
    if key.shape[1] != 1:
        raise ValueError(f"index keys have one head, got {tuple(key.shape)}")
    if weights is not None and weights.shape != query.shape[:3]:
        raise ValueError(
            f"weights must hold one number for each query and index head, "
            f"{tuple(query.shape[:3])}, got {tuple(weights.shape)}"
        )


def attend(query: Tensor, rows: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Run the attention over selected keys on plain tensors."""
    listed, call = Listed._make(arguments[:5]), unflatten(arguments[5:])
    check_listed(query, rows, listed, call)
    call.place.policy.refuse_order("attention to selected keys")
    request = request_of_keys(call.request(query.shape[0]), listed.pool_size)
    listed = listed.routed(request)
    facts = query, listed.key_and_value(query, rows)[1]
    with _checked("forward", call, request, facts, _of_listed(listed)) as transport:
        keys = _keys(rows, query, listed, request, transport, "forward")
        (query,) = unit_stride(query)
        scores = call.scores
        out, lse = selected_forward(
            query,
            keys,
            selected=listed.selected,
            route=listed.route or SELECTED,
            scale=scores.scale,
            sinks=scores.sinks,
        )
    if request.world_size > 1:
        # So that the backward call can say of which forward call it is.
        group_state_of(call.group).remember(lse)
    return out, lse


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, rows: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward op of the attention over selected keys, see `gathered_backward`."""
    listed, (out, lse), call = Listed._make(rest[:5]), rest[5:7], unflatten(rest[7:])
    call.place.policy.refuse_order("attention to selected keys")
    request = request_of_keys(call.request(query.shape[0]), listed.pool_size)
    listed = listed.routed(request)
    facts = query, listed.key_and_value(query, rows)[1]
    with _checked("backward", call, request, facts, _of_listed(listed), lse) as transport:
        keys = _keys(rows, query, listed, request, transport, "backward")
        saved = Saved(grad_out, out, lse, grad_lse)
        dtype = call.place.policy.sum_dtype(rows.dtype)
        (query,) = unit_stride(query)
        grads = selected_backward(
            saved,
            query,
            keys,
            selected=listed.selected,
            route=listed.route or SELECTED,
            scale=call.scores.scale,
            dtype=dtype,
        )
    return *grads, sinks_gradient(saved, call.scores.sinks)


def _keys(
    rows: Tensor, query: Tensor, listed: Listed, request: PlanRequest, transport: Any, ring: str
) -> SelectedKeys:
    """Return what moves the keys; refuse shards of a wrong length, and positions of no key."""
    positions, rank = positions_of_keys(request), request.rank
    places = key_positions(request.layout, request.world_size, request.seq_len)
    for name, x, expected in (
        ("query", query, places.num_local(rank)),
        ("key", rows, positions.num_local(rank)),
    ):
        if x.shape[2] != expected:
            raise ValueError(
                f"{name} of rank {rank} of {request.world_size} must have the {expected} tokens "
                f"of its shard, got {x.shape[2]}"
            )
    selected = listed.selected
    # On a GPU the host would wait; an index out of range fails there, too.
    if selected.is_cpu and selected.numel() and int(selected.amax()) >= positions.end:
        raise ValueError(
            f"selected has position {int(selected.amax())}, and keys end at {positions.end}; "
            "positions are those of the sharded sequence, as select_keys returns them"
        )
    shape = query.shape[3], (listed.value_begin, listed.value_end)
    return SelectedKeys(rows, shape, positions, rank, transport, ring)


def check_listed(query: Tensor, rows: Tensor, listed: Listed, call: Call) -> None:
    """Refuse tensors of an attention over selected keys that do not fit.

    Raises:
        ValueError: says what was given.
    """
    key, value = listed.key_and_value(query, rows)
    check_inputs(query, key, value, call.scores.sinks)
    check_selected(query, listed.selected, rows.shape[1])


def check_selected(query: Tensor, selected: Tensor, num_key_heads: int) -> None:
    """Refuse positions that do not fit the queries and the heads of keys.

    Raises:
        ValueError: says what was given.
    """
    if selected.ndim != 4 or selected.dtype != torch.int32:
        raise ValueError(
            f"selected must be int32 positions (B, L, K) or (B, G, L, K), got "
            f"{tuple(selected.shape)} {selected.dtype}; use .int()"
        )
    batch, groups, num_queries, _ = selected.shape
    if (batch, num_queries) != (query.shape[0], query.shape[2]) or num_key_heads % groups:
        raise ValueError(
            f"selected must have the batch and tokens of query {tuple(query.shape)}, and groups "
            f"that divide the {num_key_heads} key heads, got {tuple(selected.shape)}"
        )


def _fake_attend(query: Tensor, rows: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    listed, call = Listed._make(arguments[:5]), unflatten(arguments[5:])
    check_listed(query, rows, listed, call)
    check_batch(query, call.batch)
    wide = torch.promote_types(query.dtype, torch.float32)
    (query,) = unit_stride(query)
    # Compilers rely on the fake's strides, so they must be those of the implementation.
    out = empty(query, (*query.shape[:3], listed.value_end - listed.value_begin), order_of(query))
    return out, query.new_empty(query.shape[:3], dtype=wide)


def _fake_backward(
    grad_out: Tensor, grad_lse: Any, query: Tensor, rows: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sinks = unflatten(rest[7:]).scores.sinks
    (query,) = unit_stride(query)
    grad_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    grad_query = empty(query, query.shape, order_of(query))
    return grad_query, empty(rows, rows.shape, TOKEN_MAJOR), grad_sinks


def _of_listed(listed: Listed) -> dict[str, object]:
    """Return the facts of the lists that ranks compare; the positions themselves differ."""
    _, groups, _, width = listed.selected.shape
    values = listed.value_begin, listed.value_end
    found: dict[str, object] = {"selected": (groups, width), "values": values}
    return found | {"route": listed.route, "pool_size": listed.pool_size}


def _checked(
    direction: str,
    call: Call,
    request: PlanRequest,
    tensors: tuple[Tensor, Tensor],
    own: dict[str, object],
    lse: Tensor | None = None,
) -> TransportContext:
    """Return the context of a call, which gives its transport.

    Args:
        direction: what the ranks do.
        call: the call's options.
        request: the planner's arguments.
        tensors: queries, and keys or values.
        own: what ranks compare besides.
        lse: what the forward call returned, if this is its backward call.
    """
    group, (query, value) = call.group, tensors
    if request.world_size == 1:
        return nullcontext(transport_of(group))  # nobody to agree with
    number = 0 if lse is None else group_state_of(group).forward_call_of(lse)
    heads = query.shape[1], value.shape[1]
    facts = attention_facts(direction, query, value, call.scores, heads)
    record = _selected_record(facts, tuple(own.items()), call.place.policy, request)
    return checked_transport(group, record, direction, query.device, number, CALLER.site)


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda record: 4 * MAX_BYTES)
def _selected_record(
    attention: AttentionFacts,
    own: tuple[tuple[str, object], ...],
    policy: Any,
    request: PlanRequest,
) -> CallRecord:
    shared: dict[str, object] = {
        "tokens of keys": request.key_seq_len,
        "strategy": request.strategy.spec,
        "policy": policy,
        "runs": runs_text(request.layout),
        "key_runs": runs_text(request.key_layout),
    }
    return record_of(attention, request, shared | dict(own))


_SINKS = nodes.place_of_sinks(LEAVES)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, rows, selected, *rest = inputs
    # Boundaries and sinks stand among the options, and autograd must save each tensor itself.
    tensors = [i for i, x in enumerate(rest) if isinstance(x, Tensor)]
    ctx.save_for_backward(query, rows, selected, *output, *[rest[i] for i in tensors])
    ctx.tensors, ctx.rest = tensors, [None if i in tensors else x for i, x in enumerate(rest)]
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, rows, selected, out, lse, *saved = ctx.saved_tensors
    rest = list(ctx.rest)
    none = (None,) * (3 + len(rest))
    if grad_out is None and grad_lse is None:
        return none
    for i, x in zip(ctx.tensors, saved, strict=True):
        rest[i] = x
    # D = rowsum(grad_out * out) - grad_lse has both, and a zero is as good as none.
    # Only lse was used: the formula still takes a gradient of out.
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    inputs = grad_out, grad_lse, query, rows, selected, *rest[:4], out, lse, *rest[4:]
    grad_query, grad_rows, grad_sinks = selected_backward_op(*inputs)
    grads = [grad_query, grad_rows, *none[2:]]
    if rest[4 + _SINKS] is not None:
        grads[7 + _SINKS] = grad_sinks
    return tuple(grads)


def _forward_flops(query: Tensor, rows: Tensor, selected: Tensor, *rest: Any, **_: Any) -> int:
    """Count two products, each with 2 flops per listed key and head dim."""
    return 2 * _pairs(query, selected) * (number_of(query.shape[3]) + rest[1] - rest[0])


def _backward_flops(
    grad_out: Any,
    grad_lse: Any,
    query: Tensor,
    rows: Tensor,
    selected: Tensor,
    *rest: Any,
    **_: Any,
) -> int:
    """Count five products: the recomputed scores, and gradients of scores, query, key, value."""
    return 2 * _pairs(query, selected) * (3 * number_of(query.shape[3]) + 2 * (rest[1] - rest[0]))


def _pairs(query: Tensor, selected: Tensor) -> int:
    batch, heads, num_queries, _ = map(number_of, query.shape)
    return batch * heads * num_queries * number_of(selected.shape[3])


def _select_flops(query: Tensor, key: Tensor, *rest: Any, **_: Any) -> int:
    """Count a product over all pairs of local queries and keys of all ranks, seen or not."""
    pool_size, call = rest[4], unflatten(rest[5:])
    num_keys = call.place.key_seq_len
    num_keys = number_of(key.shape[2]) if num_keys is None else number_of(num_keys) // pool_size
    batch, heads, num_queries, head_dim = map(number_of, query.shape)
    return 2 * batch * heads * num_queries * num_keys * head_dim


select_op = nodes.register_op(
    "select_keys",
    "(Tensor query, Tensor key, Tensor? weights, int k, int block_size, int local_blocks, "
    f"int pool_size, {SCHEMA}) -> Tensor",
    select,
    _fake_select,
    of_integers=True,
    num_cast=0,
    flops=_select_flops,
)
selected_op = nodes.register_op(
    "selected_attention",
    f"(Tensor query, Tensor rows, {_LISTED}, {SCHEMA}) -> (Tensor out, Tensor lse)",
    attend,
    _fake_attend,
    gradient=(_gradient, _save),
    num_cast=2,
    flops=_forward_flops,
)
selected_backward_op = nodes.register_op(
    "selected_attention_backward",
    f"(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor rows, {_LISTED}, Tensor out, "
    f"Tensor lse, {SCHEMA}) -> (Tensor grad_query, Tensor grad_rows, Tensor grad_sinks)",
    backward,
    _fake_backward,
    gradient=nodes.ONCE_ONLY,
    num_cast=0,
    flops=_backward_flops,
)
