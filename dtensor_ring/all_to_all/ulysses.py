"""Runs attention with an all-to-all: an exchange to heads, the ring op, and an exchange back.

For sums in a fixed order, the exchange also brings whole blocks of the sequence to one rank.

Jacobs et al., 2023, arXiv 2309.14509 (DeepSpeed Ulysses); with a ring among groups of these ranks,
Fang and Zhao, 2024, arXiv 2405.07719. Exchanges are separate ops, so autograd keeps the exchanged
tensors, and backward exchanges only gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.all_to_all.op import (
    AllToAllArgs,
    BatchRuns,
    MaskTensors,
    all_to_all_op,
    flatten_all_to_all,
)
from dtensor_ring.all_to_all.plan import head_shard_of
from dtensor_ring.ops.checks import check_inputs
from dtensor_ring.ops.nodes import autocast_dtype, cast, is_traced
from dtensor_ring.ops.options import Call, Length, Place, flatten, group_named
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from dtensor_ring.planning.strategy import Strategy, as_strategy, why_not
from dtensor_ring.planning.tile import FULL
from dtensor_ring.transport.transport import eight_bits_of, for_rounded


def ulysses_heads(strategy: str, group_name: str) -> int:
    """Return the number of ranks that share the heads after the all-to-all, 1 without one."""
    return as_strategy(strategy, group_named(group_name).size()).heads


def _rank(group_name: str) -> int:
    return group_named(group_name).rank()


def is_exchanged(call: Call) -> bool:
    """Return whether tokens are exchanged before and after the ring op of a call.

    They are exchanged for heads, or for shards of whole blocks, see `Call.whole_blocks`.
    """
    place: Any = call.place
    if ulysses_heads(place.strategy, place.group_name) > 1:
        return True
    return place.policy.order is not None and call.whole_blocks() is not None


# Their results are constant while the group is alive, so dynamo may fold them.
# `torch.compiler.assume_constant_result` sets the same, but loads dynamo.
for _function in (ulysses_heads, _rank):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


class HeadExchange:
    """The exchanges of one attention, on the tensors of this rank.

    Args:
        call: the ring op's call on tensors with all heads.
        query: `(B, N, L, H)`.
        key: `(B, Nkv, C, H)`.

    Raises:
        ValueError: if the strategy cannot shard the heads.
    """

    def __init__(self, call: Call, query: Tensor, key: Tensor) -> None:
        place: Any = call.place
        self._is_traced, self._layout = is_traced(query), place.layout
        self._kv_dtype = eight_bits_of(place.policy)
        self._num_heads, self._lengths = (
            (query.shape[1], key.shape[1]),
            (query.shape[2], key.shape[2]),
        )
        self._heads, self._rank = (
            ulysses_heads(place.strategy, place.group_name),
            _rank(place.group_name),
        )
        num_heads, num_key_heads = self._num_heads
        reason = why_not(Strategy(self._heads), num_heads, num_key_heads)
        if reason is not None:
            raise ValueError(f"the strategy {place.strategy!r} cannot run this attention: {reason}")
        self._ordered = call.in_whole_blocks()
        if call.is_ordered and head_shard_of(0, self._heads, key.shape[1]).num_parts > 1:
            raise ValueError(
                f'order="fixed" with the strategy {place.strategy!r} needs a key head for each of '
                f"the {self._heads} ranks of a group, got {key.shape[1]}: copies of a head would "
                'be summed by rank; use "ring", or smaller groups'
            )
        (runs, key_runs), (seq_len, key_seq_len) = self._sides(call, query.shape[0])
        # Keys with another length or layout need an exchange of their own.
        self._are_alike = key_runs is runs and seq_len == key_seq_len
        self._args = (
            self._args_of(place, runs, seq_len),
            self._args_of(place, key_runs, key_seq_len),
        )
        batch = call.batch
        self._mask_options = {
            "mask_tensors": MaskTensors(batch.cu_seqlens, batch.key_cu_seqlens, batch.slices),
            "mask": call.scores.mask,
            "key_seq_len": key_seq_len,
        }

    def _sides(self, call: Call, batch: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Return the runs and the global lengths, each for queries and for keys."""
        runs, key_runs, place = call.batch.runs, call.batch.key_runs, call.place
        if key_runs is None:
            return (runs, runs), (place.seq_len, place.key_seq_len)
        if self._is_traced:
            raise ValueError(
                "key_runs say the lengths of what is exchanged, which a compiler has to know: "
                f"leave this attention uncompiled, or use another strategy than {place.strategy!r}"
            )
        request = call.request(batch)
        return (runs, key_runs), (request.seq_len, request.key_seq_len)

    def _args_of(self, place: Place, runs: Tensor | None, seq_len: Length | None) -> AllToAllArgs:
        """Return the options of an exchange of tensors with these runs and this global length."""
        return AllToAllArgs(
            batch_runs=BatchRuns(runs, None if self._is_moved else runs),
            layout=place.layout,
            to=self._ordered.place.layout,
            heads=self._heads,
            num_heads=(),
            num_key_heads=self._num_heads[1],
            seq_len=seq_len,
            num_tokens=None,
            group_name=place.group_name,
            mask=FULL,
            is_compiled=self._is_traced,
        )

    def to_heads(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        """Exchange tensors shaped like query or key to the group's tokens and some of the heads."""
        return self._all_to_all(queries, keys, is_back=False)

    def to_tokens(self, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> list[Tensor]:
        """Exchange tensors shaped like query or key back to this rank's tokens and all heads."""
        return self._all_to_all(queries, keys, is_back=True)

    def _all_to_all(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], is_back: bool
    ) -> list[Tensor]:
        counts = [self._num_heads[0]] * len(queries), [self._num_heads[1]] * len(keys)
        sides = [(queries, counts[0], 0), (keys, counts[1], 1)]
        if self._are_alike:  # one exchange for all tensors
            sides = [([*queries, *keys], [*counts[0], *counts[1]], 0)]
        results: list[Tensor] = []
        for tensors, num_heads, side in sides:
            if tensors:
                num_tokens = self._lengths[side] if is_back else None
                args = self._args[side]._replace(
                    num_heads=tuple(num_heads), num_tokens=num_tokens, is_back=is_back
                )
                # Keys and values are the last two tensors of the exchange that has them.
                if keys and tensors[-1] is keys[-1] and not is_back:
                    args = args._replace(kv_dtype=self._kv_dtype)
                if side == 0 and not is_back:  # check now what the ring op would refuse later
                    args = args._replace(**self._mask_options)
                results += all_to_all_op(list(tensors), *flatten_all_to_all(args))
        return results

    def inner(self, call: Call, rounded: Tensor | None) -> Call:
        """Return the call on this rank's heads.

        Args:
            call: the call on all heads.
            rounded: keys and values in eight bits, if they travel on between groups.
        """
        if self._is_moved:
            call = call._replace(batch=self._ordered.batch, place=self._ordered.place)
        sinks, place = call.scores.sinks, call.place
        if call.scores.dropout_p:
            row, head = call.scores.first or (0, 0)
            # Dropout counts heads of the whole batch, and this rank's begin here.
            first = row, head + self._span.start
            call = call._replace(scores=call.scores._replace(first=first))
        if rounded is not None:
            call = call._replace(rounded=rounded)
        elif self._kv_dtype is not None:  # nothing is rounded twice, see Note [Rounded once]
            call = call._replace(place=place._replace(policy=for_rounded(place.policy)))
        if sinks is None:
            return call
        return call._replace(scores=call.scores._replace(sinks=sinks[self._span]))

    def all_sinks(self, own: Tensor, sinks: Tensor) -> Tensor:
        """Return the gradient of all sinks from that of this rank's sinks; other entries are 0."""
        grad = torch.zeros_like(sinks)
        grad[self._span] = own
        return grad

    @property
    def _is_moved(self) -> bool:
        """Whether tokens are on other ranks after the exchange, besides those of a group."""
        return self._ordered.place.layout != self._layout

    @property
    def _span(self) -> slice:
        num_heads, num_key_heads = self._num_heads
        shard = head_shard_of(self._rank % self._heads, self._heads, num_key_heads)
        first, end = shard.span(num_heads, num_key_heads)
        return slice(first, end)


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, with_lse: bool = True, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return `(out, lse)` of this rank's tokens.

    Args:
        query: `(B, N, L, H)`.
        key: `(B, Nkv, C, H)`.
        value: `(B, Nkv, C, Hv)`.
        call: the ring op's call on tensors with all heads.
        with_lse: whether lse is exchanged and returned.
        keep: whether `ulysses_backward` follows; then lse holds the exchanged tensors for it.

    Raises:
        ValueError: if the strategy cannot shard the heads.
    """
    query, key, value = as_autocast(query, key, value)
    check_inputs(query, key, value, call.scores.sinks, may_be_biased=True)
    # With P ranks that share the heads:
    #     (B, N, L, H)            this rank's tokens, all heads
    #     (B, N / P, P * L, H)    after the exchange: tokens of P ranks, its own heads
    #     (B, N / P, P * L, Hv)   after the ring op, which is a ring among groups of P ranks
    #     (B, N, L, Hv)           after the exchange back
    exchange = HeadExchange(call, query, key)
    query, key, value, *others = exchange.to_heads([query], [key, value])
    rounded = others[0] if others else None
    out, lse = ring_op(query, key, value, *flatten(exchange.inner(call, rounded)))
    exchanged = RingTensors(query, key, value, out, lse, rounded)
    if not with_lse:
        (out,) = exchange.to_tokens([out])
        return out, None
    # In the message of the output, as a head of one number: latency is paid once.
    out, lse = exchange.to_tokens([out, lse.unsqueeze(-1)])
    lse = lse.squeeze(-1).contiguous()
    if keep:
        # Backward finds the exchanged tensors by the memory of lse, and then sends gradients only.
        _memory_of(lse).dtensor_ring_kept = exchanged
    return out, lse


class RingTensors(NamedTuple):
    """The inputs and results of the ring op between two exchanges.

    Note [What backward needs]: for an op on DTensors, autograd keeps the tensors before the
    exchange. Backward would exchange them again and send twice the necessary amount. Autograd also
    keeps lse, so we attach the exchanged tensors to the storage of lse, which lives exactly as
    long. Hooks that save another tensor for lse (offloading) lose them. Then all ranks exchange
    again, because all of them have these hooks.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    rounded: Tensor | None = None


def _memory_of(lse: Tensor) -> Any:
    """Return the storage that all views of a tensor share, also while a compiler traces."""
    return getattr(lse, "elem", lse).untyped_storage()


def as_autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Cast query, key and value like the ring op under autocast, so they travel in that dtype."""
    device_type = tensors[0].device.type
    dtype = autocast_dtype(device_type)
    return tensors if dtype is None else [cast(x, device_type, dtype) for x in tensors]


def ulysses_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of the ring's backward op from the tensors before the exchange."""
    exchange, sinks = HeadExchange(call, query, key), call.scores.sinks
    # An lse is exchanged as heads of one dim.
    grads = [grad_out] if grad_lse is None else [grad_out, grad_lse.unsqueeze(-1)]
    kept = getattr(_memory_of(lse), "dtensor_ring_kept", None)
    if kept is None:
        # Nothing was kept: the saved tensors are exchanged again, with the gradients.
        like_query = [*grads, query, out, lse.unsqueeze(-1)]
        found = exchange.to_heads(like_query, [key, value])
        num = len(like_query)
        (*grads, query, out, lse), (key, value, *others) = found[:num], found[num:]
        kept = RingTensors(query, key, value, out, _rows(lse), others[0] if others else None)
    else:
        # Keys and queries were kept: only gradients are exchanged.
        grads = exchange.to_heads(grads, [])
    grad_rows = None if grad_lse is None else _rows(grads[1])
    *results, grad_sinks = ring_backward_op(
        grads[0], grad_rows, *kept[:-1], *flatten(exchange.inner(call, kept.rounded))
    )
    results = exchange.to_tokens(results[:1], results[1:])
    if sinks is not None:
        grad_sinks = exchange.all_sinks(grad_sinks, sinks)
    return results[0], results[1], results[2], grad_sinks


def _rows(exchanged: Tensor) -> Tensor:
    """Return one number for each row, in the form of the ring op's lse."""
    return exchanged.squeeze(-1).contiguous()
