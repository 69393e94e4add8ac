"""Builds the record of an op call, which ranks compare before they exchange data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.agreement.checked_transport import TransportContext, agreed_transport
from dtensor_ring.agreement.record import MAX_BYTES, Word
from dtensor_ring.agreement.session import session_of
from dtensor_ring.ops.boundaries import check_integers, on_host
from dtensor_ring.ops.caller import CALLER
from dtensor_ring.ops.decode_options import DecodeCall, DecodeQuestion
from dtensor_ring.ops.exchange_options import Trade
from dtensor_ring.ops.options import Call, Question
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.run_table import MARKED, RunTable
from dtensor_ring.planning.slices import Slices
from dtensor_ring.transport.combine import MERGES, Combine, first_bytes, merge_by_size, packed_bytes
from dtensor_ring.transport.policy import TransferPolicy
from dtensor_ring.transport.transport import is_plain, transport_of

# The largest number of boundaries that a call record spells out. Longer lists become both ends and
# a digest.
MAX_NUMBERS = 24


class _Attention(NamedTuple):
    """The fields that all attention calls have in their records."""

    direction: str
    dtype: torch.dtype
    device: str
    batch: int
    num_heads: int
    head_dim: int
    num_key_heads: int
    value_head_dim: int
    sinks: torch.dtype | None
    scale: float
    softcap: float
    kernel: str | None


def agreed_call(
    call: Call,
    question: Question,
    query: Tensor,
    value: Tensor,
    lse: Tensor | None = None,
) -> TransportContext:
    """Return the context of a call, which gives its transport.

    Args:
        call: the call's options.
        question: the planner's arguments.
        query: this rank's queries.
        value: this rank's values.
        lse: the lse that the forward call returned, if this is its backward call.
    """
    group = call.group
    if question.world_size == 1:
        return nullcontext(transport_of(group))  # nobody to agree with
    origin = 0 if lse is None else session_of(group).origin_of(lse)
    direction = "forward" if lse is None else "backward"
    # The mask is part of `question`. The shape of sinks follows from the query's heads.
    _, scale, softcap, sinks, kernel = call.scores
    heads = query.shape[1], value.shape[1]
    if question.strategy.heads > 1:
        heads = 0, 0  # the ranks of a group may have different numbers of heads
    attention = _Attention(
        *(direction, query.dtype, query.device.type),
        *(query.shape[0], heads[0], query.shape[3], heads[1], value.shape[3]),
        *(None if sinks is None else sinks.dtype, scale, softcap, kernel),
    )
    word = _word(attention, call.place.policy, *question)
    return agreed_transport(group, word, direction, query.device, origin, CALLER.where)


def agreed_decode(
    call: DecodeCall, question: DecodeQuestion, query: Tensor, value: Tensor
) -> AbstractContextManager[Combine | None]:
    """Return the context of a decode call, which gives the merge of the partial results.

    Args:
        call: the call's options.
        question: the planner's arguments.
        query: the queries, equal on all ranks.
        value: this rank's values.
    """
    group, merge = call.group, call.place.merge
    if merge is not None and merge not in MERGES:
        raise ValueError(f"unknown merge {merge!r}; known merges: {', '.join(MERGES)}")
    agree = _agreed(call.batch.agree)
    if group is None or question.world_size == 1:
        return nullcontext()  # nobody to agree with
    merge = merge or merge_by_size(packed_bytes(query, value), question.world_size)
    _, scale, softcap, sinks, kernel = call.scores
    batch, num_heads, num_queries, head_dim = query.shape
    attention = _Attention(
        *("decode", query.dtype, query.device.type),
        *(batch, num_heads, head_dim, value.shape[1], value.shape[3]),
        *(None if sinks is None else sinks.dtype, scale, softcap, kernel),
    )
    word = _decode_word(attention, num_queries, merge, agree, *question)
    size = first_bytes(query, value, merge, question.world_size)
    agreed = agreed_transport(
        group, word, "decode", query.device, where=CALLER.where, first_bytes=size
    )
    return _combining(agreed, question, merge)


def agreed_exchange(
    trade: Trade, layouts: tuple[Layout, Layout], tensors: Sequence[Tensor]
) -> TransportContext:
    """Return the context of an exchange, which gives its transport."""
    group, first = trade.group, tensors[0]
    if group.size() == 1:
        return nullcontext(transport_of(group))  # nobody to agree with
    batch, dims = len(first), tuple((x.shape[3], x.dtype) for x in tensors)
    word = _exchange_word(
        is_plain(transport_of(group), first.device),
        *(trade.is_back, first.device.type, batch, dims, tuple(trade.num_heads)),
        *(trade.num_key_heads, trade.heads, trade.seq_len, *layouts),
        *(trade.key_seq_len, trade.mask, *trade.documents(batch), trade.slices(batch)),
    )
    direction = _direction(trade.is_back)
    return agreed_transport(group, word, direction, first.device, trade.origin, CALLER.where)


def _direction(is_back: bool) -> str:
    return "exchange back" if is_back else "exchange"


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda word: 4 * MAX_BYTES)
def _exchange_word(
    is_plain: bool,
    is_back: bool,
    device: str,
    batch: int,
    dims: tuple[tuple[int, torch.dtype], ...],
    num_heads: tuple[int, ...],
    num_key_heads: int,
    heads: int,
    seq_len: int,
    before: Layout,
    after: Layout,
    key_seq_len: int | None,
    mask: Mask,
    documents: Documents | None,
    key_documents: Documents | None,
    slices: Slices | None,
) -> Word:
    fields: dict[str, object] = {
        "direction": _direction(is_back),
        "transport": "that of the group" if is_plain else "another one",
        "device": device,
        "batch": batch,
        "dtypes": ", ".join(str(dtype) for _, dtype in dims),
        "head dims": [head_dim for head_dim, _ in dims],
        "heads": list(num_heads),
        "key heads": num_key_heads,
        "ranks that share the heads": heads,
        "tokens": seq_len,
        "layout": _spelled(before),
        "layout after": _spelled(after),
        "runs": _runs(before),
        "runs after": _runs(after),
        "tokens of keys": key_seq_len,
        "mask": mask,
        "cu_seqlens": _boundaries(documents),
        "key_cu_seqlens": _boundaries(key_documents),
        "slices": _tables(slices),
    }
    return Word({name: str(value) for name, value in fields.items()})


def _spelled(layout: Layout) -> str:
    return layout.name if layout.per_batch else layout.spec


@contextmanager
def _combining(agreed: TransportContext, question: DecodeQuestion, merge: str) -> Iterator[Combine]:
    with agreed as transport:
        yield Combine(transport, question.rank, question.world_size, merge)


def _agreed(agree: Tensor | None) -> str:
    """Describe the integers of `agree`, which must be equal on all ranks."""
    if agree is None:
        return "none"
    check_integers(agree, "agree")
    return _numbers(on_host(agree).numpy().reshape(-1))


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda word: 4 * MAX_BYTES)
def _decode_word(
    attention: _Attention, num_queries: int, merge: str, agree: str, *asked: Any
) -> Word:
    question = DecodeQuestion(*asked)
    own: dict[str, object] = {
        "tokens of queries": num_queries,
        "agree": agree,
        "query_starts": _numbers(np.array(question.starts, dtype=np.int64)),
        "merge": merge,
        "key_runs": _runs(question.layout),
    }
    return _word_of(attention, question, own)


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda word: 4 * MAX_BYTES)
def _word(attention: _Attention, policy: TransferPolicy, *asked: Any) -> Word:
    question = Question(*asked)
    own: dict[str, object] = {
        "tokens of keys": question.key_seq_len,
        "strategy": question.strategy.spec,
        "policy": policy,
        "key_cu_seqlens": _boundaries(question.key_documents),
        "runs": _runs(question.layout),
        "key_runs": _runs(question.key_layout),
    }
    return _word_of(attention, question, own)


def _word_of(
    attention: _Attention, question: Question | DecodeQuestion, own: dict[str, object]
) -> Word:
    """Build a call record from the fields that all ops share and an op's own fields."""
    fields = {
        "direction": attention.direction,
        "dtype": attention.dtype,
        "device": attention.device,
        "batch": attention.batch,
        "query heads": attention.num_heads,
        "key heads": attention.num_key_heads,
        "head dim": attention.head_dim,
        "value head dim": attention.value_head_dim,
        "tokens": question.seq_len,
        "mask": question.mask,
        "scale": attention.scale,
        "softcap": attention.softcap,
        "sinks": attention.sinks,
        "kernel": attention.kernel,
        "layout": _spelled(question.layout),
        "cu_seqlens": _boundaries(question.documents),
        "slices": _tables(question.slices),
    }
    return Word({name: str(value) for name, value in (fields | own).items()})


@cached_bytes(max_bytes=1 << 20, num_bytes=len)  # once for forward and backward
def _boundaries(documents: Documents | None) -> str:
    """Describe the boundaries of each batch row."""
    return "none" if documents is None else ", ".join(map(_numbers, documents.arrays))


@cached_bytes(max_bytes=1 << 20, num_bytes=len)
def _tables(slices: Slices | None) -> str:
    """Describe the slices of each batch row."""
    if slices is None:
        return "none"
    rows = slices.numbers if slices.numbers.ndim == 3 else [slices.numbers]
    return ", ".join(_numbers(row.reshape(-1)) for row in rows)


@cached_bytes(max_bytes=1 << 20, num_bytes=len)
def _runs(layout: Layout | None) -> str:
    """Describe the start and length of each run, rank by rank, and the table's mark."""
    if not isinstance(layout, RunTable):
        return "none"
    text = _numbers(layout.numbers.reshape(-1))
    return f"{text}, sequences selected ({layout.mark - MARKED:x})" if layout.mark else text


def _numbers(listed: np.ndarray) -> str:
    """Describe a list of numbers; a long one by both ends and a digest."""
    if listed.size <= MAX_NUMBERS:
        return str(listed.tolist())
    begin, end = (", ".join(map(str, part.tolist())) for part in (listed[:8], listed[-2:]))
    digest = blake2b(np.ascontiguousarray(listed).tobytes(), digest_size=6).hexdigest()
    return f"[{begin}, ..., {end}] ({listed.size:,} numbers, digest {digest})"
