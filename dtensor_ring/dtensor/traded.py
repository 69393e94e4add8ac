"""Runs attention with an all-to-all: an exchange to heads, the ring op, and an exchange back.

Jacobs et al., 2023, arXiv 2309.14509 (DeepSpeed Ulysses); with a ring among groups of these ranks,
Fang and Zhao, 2024, arXiv 2405.07719. Exchanges are separate ops, so autograd keeps the exchanged
tensors, and backward exchanges only gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.ops.autocast import autocast_dtype, cast
from dtensor_ring.ops.autograd import exchange_op, ring_op
from dtensor_ring.ops.check import check_inputs
from dtensor_ring.ops.exchange_options import Dealt, Seen, Trade, flatten_trade
from dtensor_ring.ops.options import Call, flatten, group_named
from dtensor_ring.ops.schema import ring_backward_op
from dtensor_ring.planning.all_to_all import head_shard_of
from dtensor_ring.planning.strategy import Strategy, as_strategy, why_not


def traded_heads(strategy: str, group_name: str) -> int:
    """Return the number of ranks that share the heads after the all-to-all, 1 without one."""
    return as_strategy(strategy, group_named(group_name).size()).heads


def _rank(group_name: str) -> int:
    return group_named(group_name).rank()


# Their results are constant while the group is alive, so dynamo may fold them.
# `torch.compiler.assume_constant_result` sets the same, but loads dynamo.
for _function in (traded_heads, _rank):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Trading:
    """The exchanges of one attention, on the tensors of this rank.

    Args:
        call: of the ring op, as on tensors of all heads.
        query: `(B, N, L, H)`.
        key: `(B, Nkv, C, H)`.

    Raises:
        ValueError: if the strategy cannot deal so many heads.
    """

    def __init__(self, call: Call, query: Tensor, key: Tensor) -> None:
        place: Any = call.place
        self._num_heads, self._lengths = (
            (query.shape[1], key.shape[1]),
            (query.shape[2], key.shape[2]),
        )
        self._heads, self._rank = (
            traded_heads(place.strategy, place.group_name),
            _rank(place.group_name),
        )
        reason = why_not(Strategy(self._heads), *self._num_heads)
        if reason is not None:
            raise ValueError(f"the strategy {place.strategy!r} cannot run this attention: {reason}")
        (runs, key_runs), (seq_len, key_seq_len) = self._dealt(call, query.shape[0])
        # Keys of another length, or dealt in another way, are exchanged by themselves.
        self._are_alike = key_runs is runs and seq_len == key_seq_len
        self._trades = tuple(
            Trade(
                *(Dealt(of_side, of_side), place.layout, place.layout, self._heads, ()),
                *(self._num_heads[1], length, None, place.group_name),
                is_compiled=torch.compiler.is_compiling(),
            )
            for of_side, length in ((runs, seq_len), (key_runs, key_seq_len))
        )
        batch = call.batch
        self._seen = {
            "seen": Seen(batch.cu_seqlens, batch.key_cu_seqlens, batch.slices),
            "mask": call.scores.mask,
            "key_seq_len": key_seq_len,
        }

    def _dealt(self, call: Call, batch: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Runs and global lengths, of queries and of keys."""
        runs, key_runs, place = call.batch.runs, call.batch.key_runs, call.place
        if key_runs is None:
            return (runs, runs), (place.seq_len, place.key_seq_len)
        if torch.compiler.is_compiling():
            raise ValueError(
                "key_runs say the lengths of what is exchanged, which a compiler has to know: "
                f"leave this attention uncompiled, or use another strategy than {place.strategy!r}"
            )
        seq_len = call.question(batch).seq_len  # both are of one sequence
        return (runs, key_runs), (seq_len, seq_len)

    def to_heads(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like query and like key, with the group's tokens and a part of the heads."""
        return self._exchanged(queries, keys, is_back=False)

    def to_tokens(self, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> list[Tensor]:
        """Tensors like query and like key, with the tokens of this rank and all heads."""
        return self._exchanged(queries, keys, is_back=True)

    def _exchanged(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], is_back: bool
    ) -> list[Tensor]:
        counts = [self._num_heads[0]] * len(queries), [self._num_heads[1]] * len(keys)
        sides = [(queries, counts[0], 0), (keys, counts[1], 1)]
        if self._are_alike:  # one message has all of them
            sides = [([*queries, *keys], [*counts[0], *counts[1]], 0)]
        results: list[Tensor] = []
        for tensors, num_heads, side in sides:
            if tensors:
                num_tokens = self._lengths[side] if is_back else None
                trade = self._trades[side]._replace(
                    num_heads=tuple(num_heads), num_tokens=num_tokens, is_back=is_back
                )
                if side == 0 and not is_back:  # checks what the ring op would find after it
                    trade = trade._replace(**self._seen)
                results += exchange_op(list(tensors), *flatten_trade(trade))
        return results

    def with_own_sinks(self, call: Call) -> Call:
        """The call on the heads of this rank."""
        sinks = call.scores.sinks
        if sinks is None:
            return call
        return call._replace(scores=call.scores._replace(sinks=sinks[self._span]))

    def all_sinks(self, own: Tensor, sinks: Tensor) -> Tensor:
        """The gradient of all sinks, which those of this rank's heads have."""
        grad = torch.zeros_like(sinks)
        grad[self._span] = own
        return grad

    @property
    def _span(self) -> slice:
        shard = head_shard_of(self._rank % self._heads, self._heads, self._num_heads[1])
        return slice(*shard.span(*self._num_heads))


def traded_attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, with_lse: bool = True, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`(out, lse)` of this rank's tokens; without lse it is not exchanged.

    Args:
        query: `(B, N, L, H)`.
        key: `(B, Nkv, C, H)`.
        value: `(B, Nkv, C, Hv)`.
        call: of the ring op, as on tensors of all heads.
        with_lse: whether lse is returned.
        keep: whether backward is `traded_backward`, for which lse then holds what was exchanged.

    Raises:
        ValueError: if the strategy cannot deal so many heads.
    """
    query, key, value = _as_autocast(query, key, value)
    check_inputs(query, key, value, call.scores.sinks)
    trading = Trading(call, query, key)
    query, key, value = trading.to_heads([query], [key, value])
    out, lse = ring_op(query, key, value, *flatten(trading.with_own_sinks(call)))
    exchanged = Exchanged(query, key, value, out, lse)
    if not with_lse:
        (out,) = trading.to_tokens([out])
        return out, None
    out, lse = trading.to_tokens([out, lse.unsqueeze(-1)])
    lse = lse.squeeze(-1).contiguous()
    if keep:
        _memory_of(lse).dtensor_ring_exchanged = exchanged
    return out, lse


class Exchanged(NamedTuple):
    """What the ring op got and returned between two exchanges.

    Note [What backward needs]: where autograd sees an op on DTensors, it keeps the tensors of this
    rank's tokens. Backward would exchange them once more, twice of what it has to send. So the
    memory of lse, which autograd keeps too, holds these: as an attribute of its storage, which
    lives exactly as long. Hooks that save another tensor for lse (offloading) let go of them; then
    all ranks exchange again, as they all have those hooks.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


def _memory_of(lse: Tensor) -> Any:
    """The storage that all views of a tensor share, also of a tensor that a compiler traces."""
    return getattr(lse, "elem", lse).untyped_storage()


def _as_autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Query, key and value as the ring op casts them, so that they travel in that dtype."""
    device_type = tensors[0].device.type
    dtype = autocast_dtype(device_type)
    return tensors if dtype is None else [cast(x, device_type, dtype) for x in tensors]


def traded_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of the ring's backward op, where autograd has kept this rank's tokens."""
    trading, sinks = Trading(call, query, key), call.scores.sinks
    grads = [grad_out] if grad_lse is None else [grad_out, grad_lse.unsqueeze(-1)]
    kept = getattr(_memory_of(lse), "dtensor_ring_exchanged", None)
    if kept is None:
        like_query = [*grads, query, out, lse.unsqueeze(-1)]
        *like_query, key, value = trading.to_heads(like_query, [key, value])
        *grads, query, out, lse = like_query
        kept = Exchanged(query, key, value, out, _rows(lse))
    else:
        grads = trading.to_heads(grads, [])
    grad_rows = None if grad_lse is None else _rows(grads[1])
    *results, grad_sinks = ring_backward_op(
        *(grads[0], grad_rows, *kept), *flatten(trading.with_own_sinks(call))
    )
    results = trading.to_tokens(results[:1], results[1:])
    if sinks is not None:
        grad_sinks = trading.all_sinks(grad_sinks, sinks)
    return results[0], results[1], results[2], grad_sinks


def _rows(exchanged: Tensor) -> Tensor:
    """One number of each row, as the ring op has them."""
    return exchanged.squeeze(-1).contiguous()
