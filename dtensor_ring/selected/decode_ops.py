"""The ops of decoding with selected keys: schemas, implementations, fakes and call records.

Queries are few and replicated, and index keys stay on their ranks. Each rank takes the top k of its
local keys. One message to each other rank carries their scores and positions. All ranks merge the
same lists in the same order, so they select the same keys. Then each rank attends to the selected
keys that it holds, and partial results merge by their lse.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.agreement.call_record import MAX_BYTES, CallRecord
from dtensor_ring.agreement.checked_transport import checked_transport
from dtensor_ring.compute.accumulate import add_sinks
from dtensor_ring.compute.memory import empty, in_order, order_of
from dtensor_ring.compute.trace import Label
from dtensor_ring.decode.call import (
    AGREE,
    DECODE_LEAVES,
    DECODE_SCHEMA,
    MAX_QUERIES,
    DecodeCall,
    checked_decode,
    unflatten_decode,
)
from dtensor_ring.decode.plan import DecodeRequest
from dtensor_ring.ops import boundaries, nodes
from dtensor_ring.ops.attention_record import (
    AttentionFacts,
    attention_facts,
    numbers_text,
    record_of,
    runs_text,
)
from dtensor_ring.ops.checks import CALLER, check_inputs, check_num_queries, unit_stride
from dtensor_ring.ops.ring_op import check_batch
from dtensor_ring.planning.layout import Layout, Run, run_positions
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.tile import FULL
from dtensor_ring.selected.listed_attention import Residents, gathered_forward
from dtensor_ring.selected.op import check_index, check_selected, no_keys
from dtensor_ring.selected.plan import pool_numbers, width_of
from dtensor_ring.selected.run import (
    NO_KEY,
    BestKeys,
    IndexQueries,
    KeyChoice,
    best_keys,
    score_tile,
    tokens_of_blocks,
    tokens_of_pools,
)
from dtensor_ring.transport.transport import P2P, Transport


@cached_bytes(2**26, lambda found: found.nbytes + 64)
def own_positions(layout: Layout, rank: int, world_size: int, seq_len: int) -> np.ndarray:
    """Return the positions of a rank's columns, ascending, int32."""
    return run_positions(layout.runs(rank, world_size, seq_len), np.int32)


def columns_at(positions: Tensor, own: Tensor) -> Tensor:
    """Return the columns of positions that a rank has, int32, -1 for others.

    >>> columns_at(torch.tensor([3, 5, -1]), torch.tensor([1, 5, 7])).tolist()
    [-1, 1, -1]
    """
    if not len(own):
        return torch.full_like(positions, -1, dtype=torch.int32)
    # Where a position is not among these, the search returns a neighbour, told by its value.
    columns = torch.searchsorted(own, positions, out_int32=True).clamp_(max=len(own) - 1)
    return columns.masked_fill(own[columns.long()] != positions, -1)


def _decode_select(
    own: IndexQueries, key: Tensor, step: Step, choice: KeyChoice, at: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return scores and positions of the best keys among a rank's columns, `(B, G, M, k)`.

    Args:
        own: the queries, the same on all ranks.
        key: this rank's index keys, `(B, 1, C, Di)`.
        step: what the queries see of them.
        choice: how queries choose.
        at: the positions of the columns, `(C,)`.
    """
    batch, heads, num_queries, _ = own.query.shape
    found = BestKeys((batch, heads if own.weights is None else 1, num_queries), choice.k, own.query)
    for tile in step.tiles:
        score_tile(found, own, key, tile, choice, at[tile.cols[0] : tile.cols[1]])
    return found.lists


def _merged_lists(
    scores: Tensor,
    positions: Tensor,
    of_blocks: bool,
    place: tuple[int, int],
    transport: Transport | None,
) -> Tensor:
    """Return the positions of the best keys of all ranks, `(B, G, M, k)`, -1 for none.

    Args:
        scores: `(B, G, M, k)`, of this rank's best keys, or of blocks by its best keys of them.
        positions: int32, likewise, or numbers of blocks.
        of_blocks: whether they are numbers of blocks.
        place: this rank, and the number of ranks.
        transport: what moves the messages; `None` if this rank has all keys.
    """
    # A block that is among the best of all is among those of the rank that has its best key.
    if transport is None:
        return positions.masked_fill(positions == NO_KEY, -1)
    shape, k = scores.shape, scores.shape[-1]
    split = scores.nbytes, positions.nbytes
    # One message for both: a step of decoding is bound by latency, not by bytes.
    mine = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in (scores, positions)])
    rank, world_size = place
    everyone = _exchanged(mine, rank, world_size, transport)
    of_scores, of_positions = everyone.split(split, 1)
    scores, positions = (
        x.contiguous().view(dtype).view((world_size, *shape)).movedim(0, -2).flatten(-2)
        for x, dtype in ((of_scores, scores.dtype), (of_positions, positions.dtype))
    )
    if of_blocks:  # several ranks may list one: its best score is to come first
        scores, order = scores.sort(-1, descending=True)
        positions = positions.gather(-1, order)
    # Block 4 is on two lists, as two ranks have keys of it. Only its better score counts:
    #     position    2     4     4     7
    #     score      0.5   0.9   -inf  0.7
    # Stable: of the entries of one block the best one stays the first.
    positions, order = positions.sort(dim=-1, stable=True)
    scores = scores.gather(-1, order)
    if of_blocks:
        scores[..., 1:].masked_fill_(positions[..., 1:] == positions[..., :-1], -torch.inf)
    _, found = best_keys(scores, positions, k)
    return found.masked_fill(found == NO_KEY, -1)


def _exchanged(mine: Tensor, rank: int, world_size: int, transport: Transport) -> Tensor:
    """Return the message of each rank, `(W, bytes)`."""
    everyone = mine.new_empty(world_size, len(mine))
    everyone[rank] = mine
    label = Label("select", 0, rank)
    transport.prepare(mine.device)
    transport.at(label)
    others = [peer for peer in range(world_size) if peer != rank]
    receives = [P2P(everyone[peer], peer) for peer in others]
    works = transport.start(receives, [P2P(mine, peer) for peer in others])
    transport.at(label)
    for work in works:
        work.wait()
    return everyone


def decode_keys(
    query: Tensor,
    key: Tensor,
    weights: Tensor | None,
    k: int,
    block_size: int,
    local_blocks: int,
    pool_size: int,
    *options: Any,
) -> Tensor:
    """Run the selection among cached keys on plain tensors, see `decode_select_keys`."""
    call = unflatten_decode(options)
    check_index(query, key, weights)
    check_num_queries(query, MAX_QUERIES)
    request = call.request(query, key)
    choice = KeyChoice(k, call.scores.scale, block_size, local_blocks, pool_size)
    own = IndexQueries(query, weights, _query_positions(request, choice, query.device))
    request = _request_of_keys(request, pool_size)
    with _checked_select(call, request, query, key, (choice, weights is not None)) as transport:
        # Within the context: an error of this rank is reported to the others.
        step = request.step(key.shape[2])
        at = own_positions(request.layout, request.rank, request.world_size, request.seq_len)
        scores, found = _decode_select(own, key, step, choice, at)
        place = request.rank, request.world_size
        found = _merged_lists(scores, found, block_size > 1, place, transport)
    if pool_size > 1:
        return tokens_of_pools(found, pool_size, own.positions)
    if block_size == 1:
        return found
    runs = (Run(request.starts[0], request.num_queries),)
    found = tokens_of_blocks(found, block_size, own.positions, runs, request.seen())
    # The last block of the sequence may be short; its missing tokens are the last of a list.
    return found.masked_fill(found >= request.seq_len, -1)


def _request_of_keys(request: DecodeRequest, pool_size: int) -> DecodeRequest:
    """Return the request of a selection whose keys may be pools of the tokens in `request`."""
    if pool_size == 1:
        return request
    pools = pool_numbers(request.layout, request.world_size, request.seq_len, pool_size)
    # Which pools a query sees is told by their numbers.
    return request._replace(layout=pools, mask=FULL, seq_len=pools.end)


def _query_positions(request: DecodeRequest, choice: KeyChoice, device: torch.device) -> Tensor:
    """Return the positions of the queries, int32 `(M,)`, which blocks and pools alone need.

    Raises:
        ValueError: if rows have blocks or pools, and queries at other positions.
    """
    first, many = (
        request.starts[0],
        {"block_size": choice.block_size, "pool_size": choice.pool_size},
    )
    for name, size in many.items():
        if size > 1 and len(set(request.starts)) > 1:
            raise ValueError(
                f"query_starts must be one number for all rows with {name}={size}, got "
                f"{list(request.starts)}; call once for each row"
            )
    return torch.arange(first, first + request.num_queries, dtype=torch.int32, device=device)


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
    check_batch(query, unflatten_decode(options).batch)
    return no_keys(query, weights, width_of(k, block_size, pool_size))


def decode_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    selected: Tensor,
    value_dim: int,
    pool_size: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Run the attention to selected cached keys on plain tensors."""
    call = unflatten_decode(options)
    values = key[..., :value_dim] if value is None else value
    _check_decode(query, key, values, selected, call)
    request, sinks = _request_of_keys(call.request(query, values), pool_size), call.scores.sinks
    with checked_decode(call, request, query, values) as combine:
        request.step(values.shape[2])  # refuses columns that do not fit the runs
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


def _fake_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    selected: Tensor,
    value_dim: int,
    pool_size: int,
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
    own: tuple[KeyChoice, bool],
) -> AbstractContextManager[Transport | None]:
    """Return the context of a selection: it gives the transport. `own` tells of weights, too."""
    group, (choice, with_weights) = call.group, own
    if group is None or request.world_size == 1:
        return nullcontext()  # nobody to agree with
    agree = call.batch.agree
    text = "none" if agree is None else numbers_text(boundaries.on_host(agree).numpy().reshape(-1))
    attention = attention_facts("select keys", query, key, call.scores, (query.shape[1], 1))
    record = _best_keys_record(attention, text, own, request)
    groups = 1 if with_weights else query.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    # A message has a score, and a position of four bytes, for each chosen key.
    size = query.shape[0] * groups * query.shape[2] * choice.k * (wide.itemsize + 4)
    return checked_transport(
        group, record, "select keys", query.device, call_site=CALLER.site, first_bytes=size
    )


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda record: 4 * MAX_BYTES)
def _best_keys_record(
    attention: AttentionFacts, agree: str, own: tuple[KeyChoice, bool], request: DecodeRequest
) -> CallRecord:
    listed: dict[str, object] = {
        "tokens of queries": request.num_queries,
        AGREE: agree,
        "query_starts": request.starts,
        "key_runs": runs_text(request.layout),
        "k": own[0].k,
        "blocks": own[0][2:],
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
    sinks = rest[2 + _SINKS]
    if torch.is_grad_enabled() and torch._C._any_requires_grad(query, key, value, sinks):
        raise NotImplementedError(NO_GRADIENT)
    arguments = query, key, value, selected, *rest
    return nodes.below_autograd(decode_selected_op, decode_attend, keyset, *arguments)


decode_select_op = nodes.register_op(
    "decode_select_keys",
    "(Tensor query, Tensor key, Tensor? weights, int k, int block_size, int local_blocks, "
    f"int pool_size, {DECODE_SCHEMA}) -> Tensor",
    decode_keys,
    _fake_select,
    of_integers=True,
    num_cast=0,
)
decode_selected_op = nodes.register_op(
    "decode_selected_attention",
    "(Tensor query, Tensor key, Tensor? value, Tensor selected, int value_dim, "
    f"int pool_size, {DECODE_SCHEMA}) -> (Tensor out, Tensor lse)",
    decode_attend,
    _fake_attend,
    autograd=_without_gradient,
    num_cast=2,
)
