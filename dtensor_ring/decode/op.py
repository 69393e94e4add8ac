"""The decode op: options, schema, implementation, fake kernel, call record and flops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.flop_counter import register_flop_formula

from dtensor_ring.agreement.call_record import MAX_BYTES, CallRecord
from dtensor_ring.agreement.checked_transport import TransportContext, checked_transport
from dtensor_ring.compute.accumulate import RunningOutput, add_sinks
from dtensor_ring.compute.execute import Pair, forward_step
from dtensor_ring.compute.kernels import Kernel, Scores
from dtensor_ring.compute.lags import Lags, is_biased, resident_positions
from dtensor_ring.compute.memory import empty, in_order, order_of
from dtensor_ring.compute.trace import Label
from dtensor_ring.decode.in_blocks import decode_in_blocks, decode_pieces
from dtensor_ring.decode.plan import DecodeRequest
from dtensor_ring.decode.run import MERGES, Combine, first_round
from dtensor_ring.ops import boundaries, nodes
from dtensor_ring.ops.attention_record import (
    AttentionFacts,
    attention_facts,
    numbers_text,
    record_of,
    runs_text,
)
from dtensor_ring.ops.checks import (
    CALLER,
    check_head_dims,
    check_inputs,
    check_num_queries,
    loadable,
    unit_stride,
)
from dtensor_ring.ops.options import Arguments, Length, kernel_of
from dtensor_ring.ops.ring_op import check_batch, number_of
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.run_table import as_layout

# The largest number of query tokens. With more, a ring is as fast, and repeats no work.
MAX_QUERIES = 64


class DecodeBatch(NamedTuple):
    """Integer tensors that differ from call to call, see `decode_attention`."""

    cu_seqlens: Tensor | None = None
    slices: Tensor | None = None
    key_runs: Tensor | None = None
    query_starts: Tensor | None = None
    agree: Tensor | None = None


class DecodePlace(NamedTuple):
    """Where the keys are: sharded over the ranks of a group, or all on this rank.

    For DTensors, the placements and the axis decide, and only `merge` is given. `block` has the
    tokens of a block if sums have a fixed order.
    """

    layout: str | None = Contiguous.name
    seq_len: Length | None = None
    group_name: str | None = None
    merge: str | None = None
    block: int | None = None


class DecodeCall(NamedTuple):
    """The options of a decode call: all arguments but query, key and value."""

    batch: DecodeBatch
    scores: Scores
    place: DecodePlace

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the axis, `None` if this rank has all keys."""
        name = self.place.group_name
        return None if name is None else _resolve_process_group(name)  # type: ignore[arg-type]

    def request(self, query: Tensor, key: Tensor) -> DecodeRequest:
        """Build the planner's arguments.

        Raises:
            ValueError: if an option has a wrong shape, or queries begin before position 0.
        """
        (batch_size, _, num_queries, _), group = query.shape, self.group
        rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
        layout, end = self._keys(key, world_size)
        starts = self._starts(batch_size, end - num_queries)
        cu_seqlens, slices = self.batch.cu_seqlens, self.batch.slices
        return DecodeRequest(
            layout=layout,
            mask=self.scores.mask,
            rank=rank,
            world_size=world_size,
            seq_len=end,
            starts=starts,
            num_queries=num_queries,
            documents=None
            if cu_seqlens is None
            else boundaries.documents_of(cu_seqlens, "cu_seqlens", batch_size),
            slices=None if slices is None else boundaries.slices_of_table(slices, batch_size),
        )

    def _keys(self, key: Tensor, world_size: int) -> tuple[Layout, int]:
        """Return the layout of the keys, and the position after their last one."""
        key_runs, place = self.batch.key_runs, self.place
        if key_runs is not None:
            layout = boundaries.run_table(key_runs, "key_runs")
            return layout, layout.end
        spec: Any = place.layout
        # Shards have equal length unless a DTensor says otherwise.
        seq_len = key.shape[2] * world_size if place.seq_len is None else place.seq_len
        return as_layout(spec), seq_len

    def _starts(self, batch_size: int, default: int) -> tuple[int, ...]:
        given = self.batch.query_starts
        if given is not None:
            return boundaries.starts_of(given, batch_size)
        if default < 0:
            raise ValueError(
                f"query has {-default} tokens more than key has positions, the last of which are "
                "its own by default; pass query_starts"
            )
        return (default,)

    def select(self, query: Tensor, key: Tensor, value: Tensor, request: DecodeRequest) -> Kernel:
        """Return the named kernel, or the first one that supports the call."""
        is_packed = (
            request.documents is not None
            or request.slices is not None
            or request.mask.chunk is not None
            or len(request.starts) > 1
        )
        by_block = self.place.block is not None
        how = {"by_block": by_block, "fleeting": True}
        return kernel_of(self.scores, query, key, value, is_packed, request.slices, **how)


_ARGUMENTS = Arguments(DecodeCall, DecodeBatch, Scores, DecodePlace, Mask)
# The decode op's arguments after its tensors, in the order of `flatten_decode`.
DECODE_LEAVES, DECODE_SCHEMA = _ARGUMENTS.leaves, _ARGUMENTS.schema


# Between a call and the arguments of the decode op after its tensors.
flatten_decode, unflatten_decode = _ARGUMENTS.flatten, _ARGUMENTS.unflatten


DECODE = "dtensor_ring::decode_attention"

torch.library.define(
    DECODE, f"(Tensor query, Tensor key, Tensor value, {DECODE_SCHEMA}) -> (Tensor out, Tensor lse)"
)
decode_op = torch.ops.dtensor_ring.decode_attention.default


def forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Run the decode op on plain tensors."""
    call = unflatten_decode(options)
    check_inputs(query, key, value, call.scores.sinks, may_be_biased=True)
    check_num_queries(query, MAX_QUERIES)
    request = call.request(query, key)
    with checked_decode(call, request, query, value) as combine:
        # Within the context: an error of this rank is reported to the others.
        step, kernel = request.step(key.shape[2]), call.select(query, key, value, request)
        query, key, value = loadable(query, key, value)
        if call.place.block is None:
            lags = _lags(request, step, query) if is_biased(query, key) else None
            return decode(query, (key, value), step, kernel, call.scores, combine, lags)
        check_head_dims(query, key, value)  # a fixed order has no bias by distance
        pieces, kv = decode_pieces(call.place.block, request), (key, value)
        return decode_in_blocks(query, kv, step, pieces, kernel, call.scores, combine)


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
    out, lse = running.result()
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
    check_inputs(query, key, value, call.scores.sinks, may_be_biased=True)
    check_num_queries(query, MAX_QUERIES)
    check_batch(query, call.batch)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    # Compilers rely on the fake's strides, so they must be those of the implementation.
    (query,) = unit_stride(query)
    return empty(query, (*query.shape[:3], value.shape[3]), order_of(query)), lse


def checked_decode(
    call: DecodeCall, request: DecodeRequest, query: Tensor, value: Tensor
) -> AbstractContextManager[Combine | None]:
    """Return the context of a decode call, which gives the merge of the partial results.

    Args:
        call: the call's options.
        request: the planner's arguments.
        query: the queries, equal on all ranks.
        value: this rank's values.
    """
    group, merge, block = call.group, call.place.merge, call.place.block
    if merge is not None and merge not in MERGES:
        raise ValueError(f"unknown merge {merge!r}; known merges: {', '.join(MERGES)}")
    if merge is not None and block is not None:
        raise ValueError(f"merge={merge!r} has no fixed order, and the axis has; leave merge out")
    if call.batch.agree is not None:
        boundaries.check_integers(call.batch.agree, "agree")
    if group is None or request.world_size == 1:
        return nullcontext()  # nobody to agree with
    agree = _agree_text(call.batch.agree)
    size = None  # of nodes, which are known once the records agree
    if block is None:
        merge, size = first_round(query, value, merge, request.world_size)
    else:
        merge = f"by blocks of {block}"
    heads = query.shape[1], value.shape[1]
    attention = attention_facts("decode", query, value, call.scores, heads)
    record = _decode_record(attention, merge, agree, *request)
    agreed = checked_transport(
        group, record, "decode", query.device, call_site=CALLER.site, first_bytes=size
    )
    return _combining(agreed, request, merge)


@contextmanager
def _combining(agreed: TransportContext, request: DecodeRequest, merge: str) -> Iterator[Combine]:
    with agreed as transport:
        yield Combine(transport, request.rank, request.world_size, merge)


# The field of a record with the integers that a caller gives as `agree`.
AGREE = "tokens given as agree"


def _agree_text(agree: Tensor | None) -> str:
    """Describe the integers of `agree`, which must be equal on all ranks."""
    if agree is None:
        return "none"
    return numbers_text(boundaries.on_host(agree).numpy().reshape(-1))


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda record: 4 * MAX_BYTES)
def _decode_record(attention: AttentionFacts, merge: str, agree: str, *asked: Any) -> CallRecord:
    # Layers of a paged batch differ in `agree` only, and the other fields take longer.
    return CallRecord(_decode_fields(attention, merge, *asked) | {AGREE: agree})


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda fields: 4 * MAX_BYTES)
def _decode_fields(attention: AttentionFacts, merge: str, *asked: Any) -> dict[str, str]:
    """Return the fields of a record, without what is in `agree`."""
    request = DecodeRequest(*asked)
    own: dict[str, object] = {
        "tokens of queries": request.num_queries,
        AGREE: "",
        "query_starts": numbers_text(np.array(request.starts, dtype=np.int64)),
        "merge": merge,
        "key_runs": runs_text(request.layout),
    }
    return record_of(attention, request, own).fields


NO_GRADIENT = (
    "decode_attention has no gradient, and one of query, key, value and sinks needs one; call it "
    "within torch.no_grad(), or train with ring_attention"
)
_SINKS = nodes.place_of_sinks(DECODE_LEAVES)


def _without_gradient(
    keyset: Any, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Run the decode op, which has no gradient."""
    inputs = query, key, value, options[_SINKS]
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        raise NotImplementedError(NO_GRADIENT)
    if forward_ad._current_level >= 0:
        nodes.refuse_tangents(inputs)
    return nodes.below_autograd(decode_op, forward, keyset, query, key, value, *options)


nodes.LIBRARY.impl("decode_attention", _without_gradient, "Autograd", with_keyset=True)
nodes.register_samples(DECODE)
nodes.register_autocast(DECODE, decode_op)


@register_flop_formula(decode_op.overloadpacket, get_raw=True)
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
