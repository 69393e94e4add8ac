"""The exchange op: an all-to-all between tokens and heads in a group, or between layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor_ring.compute.memory import TOKEN_MAJOR, empty
from dtensor_ring.compute.trace import Label
from dtensor_ring.ops.check import check_exchanged
from dtensor_ring.ops.exchange_options import TRADE_SCHEMA, Trade, unflatten_trade
from dtensor_ring.ops.schema import check_batch
from dtensor_ring.ops.word import agreed_exchange
from dtensor_ring.transport.exchange import exchange_tensors, traded
from dtensor_ring.transport.messages import TensorShape

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
