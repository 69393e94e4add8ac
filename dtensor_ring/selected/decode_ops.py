"""The ops of decoding with selected keys: schemas, implementations, fakes and call records."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dtensor_ring.agreement.call_record import MAX_BYTES, CallRecord
from dtensor_ring.agreement.checked_transport import checked_transport
from dtensor_ring.compute.accumulate import add_sinks
from dtensor_ring.compute.memory import empty, in_order, order_of
from dtensor_ring.decode.op import (
    DECODE_LEAVES,
    DECODE_SCHEMA,
    MAX_QUERIES,
    DecodeCall,
    DecodeRequest,
    checked_decode,
    unflatten_decode,
)
from dtensor_ring.ops import boundaries, nodes
from dtensor_ring.ops.attention_record import (
    AttentionFacts,
    attention_facts,
    numbers_text,
    record_of,
    runs_text,
)
from dtensor_ring.ops.call_site import CALLER
from dtensor_ring.ops.checks import check_inputs, check_num_queries, unit_stride
from dtensor_ring.ops.ring_op import check_batch
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.selected.decode_keys import (
    columns_at,
    decode_select,
    merged_lists,
    own_positions,
)
from dtensor_ring.selected.listed_attention import Residents, gathered_forward
from dtensor_ring.selected.op import check_index, check_selected, register_choice
from dtensor_ring.selected.run import IndexQueries, KeyChoice
from dtensor_ring.transport.transport import Transport

DECODE_SELECT = "dtensor_ring::decode_select_keys"
DECODE_ATTEND = "dtensor_ring::decode_selected_attention"

torch.library.define(
    DECODE_SELECT, f"(Tensor query, Tensor key, Tensor? weights, int k, {DECODE_SCHEMA}) -> Tensor"
)
torch.library.define(
    DECODE_ATTEND,
    f"(Tensor query, Tensor key, Tensor? value, Tensor selected, int value_dim, {DECODE_SCHEMA}) "
    "-> (Tensor out, Tensor lse)",
)
decode_select_op = torch.ops.dtensor_ring.decode_select_keys.default
decode_selected_op = torch.ops.dtensor_ring.decode_selected_attention.default


def decode_keys(
    query: Tensor, key: Tensor, weights: Tensor | None, k: int, *options: Any
) -> Tensor:
    """Run the selection among cached keys on plain tensors, see `decode_select_keys`."""
    call = unflatten_decode(options)
    check_index(query, key, weights)
    check_num_queries(query, MAX_QUERIES)
    request, choice = call.request(query, key), KeyChoice(k, call.scores.scale)
    with _checked_select(call, request, query, key, (k, weights is not None)) as transport:
        # Within the context: an error of this rank is reported to the others.
        step = request.step(key)
        at = own_positions(request.layout, request.rank, request.world_size, request.seq_len)
        # Blocks alone need the positions of queries, and are not decoded.
        own = IndexQueries(query, weights, query.new_empty(0, dtype=torch.int32))
        scores, positions = decode_select(own, key, step, choice, at)
        return merged_lists(scores, positions, request.rank, request.world_size, transport)


torch.library.impl(DECODE_SELECT, "CompositeExplicitAutograd")(decode_keys)


@torch.library.register_fake(DECODE_SELECT)
def _fake_select(
    query: Tensor, key: Tensor, weights: Tensor | None, k: int, *options: Any
) -> Tensor:
    check_index(query, key, weights)
    check_batch(query, unflatten_decode(options).batch)
    groups = query.shape[1] if weights is None else 1
    return query.new_empty(query.shape[0], groups, query.shape[2], k, dtype=torch.int32)


def decode_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    selected: Tensor,
    value_dim: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Run the attention to selected cached keys on plain tensors."""
    call = unflatten_decode(options)
    values = key[..., :value_dim] if value is None else value
    _check_decode(query, key, values, selected, call)
    request, sinks = call.request(query, values), call.scores.sinks
    with checked_decode(call, request, query, values) as combine:
        request.step(values)  # refuses columns that do not fit the runs
        rank, size = request.rank, request.world_size
        at = torch.from_numpy(own_positions(request.layout, rank, size, request.seq_len))
        columns = columns_at(selected, at.to(selected.device))
        residents = _residents(key, value, value_dim)
        # Partials stay wide: the result is rounded once, after the last merge and the sinks.
        wide = torch.promote_types(query.dtype, torch.float32)
        out, lse = gathered_forward(query, residents, columns, call.scores.scale, None, wide)
        if combine is not None:
            out, lse = combine(out, lse)
        if sinks is not None:
            lse = add_sinks(out, lse, sinks)
        return in_order(out, order_of(unit_stride(query)[0]), query.dtype), lse


torch.library.impl(DECODE_ATTEND, "CompositeExplicitAutograd")(decode_attend)


def _residents(key: Tensor, value: Tensor | None, value_dim: int) -> Residents:
    """Return the columns of a cache, which stay where they lie."""
    head_dim, rows = key.shape[3], key.permute(2, 0, 1, 3)
    if value is None:
        return Residents(rows, None, head_dim, (0, value_dim))
    return Residents(
        rows, None, head_dim, (head_dim, head_dim + value_dim), value.permute(2, 0, 1, 3)
    )


def _check_decode(
    query: Tensor, key: Tensor, value: Tensor, selected: Tensor, call: DecodeCall
) -> None:
    """Refuse tensors that do not fit, and more queries than every rank should compute."""
    check_inputs(query, key, value, call.scores.sinks)
    check_num_queries(query, MAX_QUERIES)
    check_selected(query, selected, key.shape[1])


@torch.library.register_fake(DECODE_ATTEND)
def _fake_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    selected: Tensor,
    value_dim: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    call = unflatten_decode(options)
    _check_decode(query, key, key[..., :value_dim] if value is None else value, selected, call)
    check_batch(query, call.batch)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    (query,) = unit_stride(query)
    return empty(query, (*query.shape[:3], value_dim), order_of(query)), lse


def _checked_select(
    call: DecodeCall,
    request: DecodeRequest,
    query: Tensor,
    key: Tensor,
    own: tuple[int, bool],
) -> AbstractContextManager[Transport | None]:
    """Return the context of a selection, which gives its transport; `own` is k, and weights."""
    group, (k, with_weights) = call.group, own
    if group is None or request.world_size == 1:
        return nullcontext()  # nobody to agree with
    agree = call.batch.agree
    text = "none" if agree is None else numbers_text(boundaries.on_host(agree).numpy().reshape(-1))
    attention = attention_facts("select keys", query, key, call.scores, (query.shape[1], 1))
    record = _best_keys_record(attention, text, own, *request)
    groups = 1 if with_weights else query.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    size = query.shape[0] * groups * query.shape[2] * k * (wide.itemsize + 4)
    return checked_transport(
        group, record, "select keys", query.device, call_site=CALLER.site, first_bytes=size
    )


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda record: 4 * MAX_BYTES)
def _best_keys_record(
    attention: AttentionFacts, agree: str, own: tuple[int, bool], *asked: Any
) -> CallRecord:
    request = DecodeRequest(*asked)
    listed: dict[str, object] = {
        "tokens of queries": request.num_queries,
        "agree": agree,
        "query_starts": request.starts,
        "key_runs": runs_text(request.layout),
        "k": own[0],
        "weights": own[1],
    }
    return record_of(attention, request, listed)


NO_GRADIENT = (
    "decode_selected_attention has no gradient, and one of query, key, value and sinks needs one; "
    "call it within torch.no_grad(), or train with selected_attention"
)
_SINKS = nodes.place_of_sinks(DECODE_LEAVES)


def _without_gradient(
    keyset: Any, query: Tensor, key: Tensor, value: Any, selected: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    inputs = [x for x in (query, key, value, rest[1 + _SINKS]) if x is not None]
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        raise NotImplementedError(NO_GRADIENT)
    arguments = query, key, value, selected, *rest
    return nodes.below_autograd(decode_selected_op, decode_attend, keyset, *arguments)


nodes.LIBRARY.impl("decode_selected_attention", _without_gradient, "Autograd", with_keyset=True)
nodes.register_samples(DECODE_ATTEND)
nodes.register_autocast(DECODE_ATTEND, decode_selected_op, 2)
register_choice(DECODE_SELECT, decode_select_op, decode_keys)
