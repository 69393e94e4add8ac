"""The exchange op: an all-to-all between tokens and heads in a group, or between layouts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from dtensor_ring.agreement.checked_transport import TransportContext, agreed_transport
from dtensor_ring.agreement.record import MAX_BYTES, Word
from dtensor_ring.agreement.session import session_of
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty
from dtensor_ring.compute.trace import Label
from dtensor_ring.ops.caller import CALLER
from dtensor_ring.ops.check import check_exchanged
from dtensor_ring.ops.exchange_options import (
    TRADE_SCHEMA,
    Dealt,
    Seen,
    Trade,
    flatten_trade,
    unflatten_trade,
)
from dtensor_ring.ops.nodes import below_autograd, is_plain_call, refuse_tangents
from dtensor_ring.ops.record import boundaries_text, runs_text, slices_text, spelled
from dtensor_ring.ops.schema import check_batch
from dtensor_ring.ops.transforms import LIBRARY, recorded, register_samples
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.slices import Slices
from dtensor_ring.transport.exchange import exchange_tensors, traded
from dtensor_ring.transport.messages import TensorShape
from dtensor_ring.transport.transport import is_plain, transport_of

EXCHANGE = "dtensor_ring::exchange"

torch.library.define(EXCHANGE, f"(Tensor[] tensors, {TRADE_SCHEMA}) -> Tensor[]")
exchange_op = torch.ops.dtensor_ring.exchange.default


def forward(tensors: list[Tensor], *options: Any) -> list[Tensor]:
    """Run the exchange op on plain tensors."""
    trade = unflatten_trade(options)
    check_exchanged(tensors)
    layouts, rank = trade.layouts(), trade.group.rank()
    with agreed_exchange(trade, layouts, tensors) as transport:
        # Within the context: an error of this rank is reported to the others.
        trade.check_attention(len(tensors[0]))
        plan = trade.plan(tensors, layouts)
        heads, shapes = tuple(trade.num_heads), tuple(map(TensorShape.of, tensors))
        messages = traded(plan, heads, trade.num_key_heads, shapes, trade.is_back)
        return exchange_tensors(tensors, messages, transport, Label("exchange", 0, rank))


torch.library.impl(EXCHANGE, "CompositeExplicitAutograd")(forward)


@torch.library.register_fake(EXCHANGE)
def _fake(tensors: list[Tensor], *options: Any) -> list[Tensor]:
    trade: Trade = unflatten_trade(options)
    check_exchanged(tensors)
    check_batch(tensors[0], trade.dealt)
    check_batch(tensors[0], trade.seen)
    group = trade.group
    num_tokens = trade.tokens_after(group.rank(), group.size())
    # Compilers rely on the strides, so they must be those of `exchange_tensors`.
    return [
        empty(x, (x.shape[0], heads, num_tokens, x.shape[3]), TOKEN_MAJOR)
        for x, heads in zip(tensors, trade.heads_after(group.rank()), strict=True)
    ]


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
        "layout": spelled(before),
        "layout after": spelled(after),
        "runs": runs_text(before),
        "runs after": runs_text(after),
        "tokens of keys": key_seq_len,
        "mask": mask,
        "cu_seqlens": boundaries_text(documents),
        "key_cu_seqlens": boundaries_text(key_documents),
        "slices": slices_text(slices),
    }
    return Word({name: str(value) for name, value in fields.items()})


class _ExchangeFunction(_SingleLevelFunction):
    """The autograd node of an exchange. It is linear: its backward is the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, options: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = [*tensors], *options
        outputs = below_autograd(exchange_op, forward, keyset, *inputs, of_node=True)
        trade = unflatten_trade(options)
        ctx.save_for_backward(*trade.dealt)
        # While a compiler traces, no call is made, so there is no call number.
        origin = session_of(trade.group).number if is_plain_call(keyset) else 0
        ctx.trade = trade._replace(
            dealt=Dealt(),
            seen=Seen(),  # the forward call has checked it
            key_seq_len=None,
            is_back=not trade.is_back,
            num_tokens=tensors[0].shape[2],
            origin=0 if trade.origin else origin,
        )
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        given = [i for i, grad in enumerate(grads) if grad is not None]
        results: list[Any] = [None] * len(grads)
        if given:
            trade = ctx.trade._replace(
                dealt=Dealt(*ctx.saved_tensors),
                num_heads=tuple(ctx.trade.num_heads[i] for i in given),
            )
            found = exchange_op([grads[i] for i in given], *flatten_trade(trade))
            for i, grad in zip(given, found, strict=True):
                results[i] = grad
        return None, None, *results


def _exchange(keyset: Any, tensors: list[Tensor], *options: Any) -> Any:
    if forward_ad._current_level >= 0:
        refuse_tangents(tuple(tensors))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return list(recorded(_ExchangeFunction, keyset, options, *tensors))
    return below_autograd(exchange_op, forward, keyset, tensors, *options)


LIBRARY.impl("exchange", _exchange, "Autograd", with_keyset=True)
register_samples(EXCHANGE)
