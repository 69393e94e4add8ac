"""The ring op, forward and backward: schema, implementation, fake kernels, gradient and flops."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from dtensor_ring.agreement.call_record import MAX_BYTES, CallRecord
from dtensor_ring.agreement.checked_transport import TransportContext, checked_transport
from dtensor_ring.agreement.group_state import group_state_of
from dtensor_ring.balanced.work import visible_pairs
from dtensor_ring.compute.kernels import Saved
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty, order_of
from dtensor_ring.compute.sole import sole_backward, sole_forward
from dtensor_ring.ops import nodes
from dtensor_ring.ops.attention_record import (
    AttentionFacts,
    attention_facts,
    boundaries_text,
    record_of,
    runs_text,
)
from dtensor_ring.ops.bound import TENSORS, BoundCall, bound_call
from dtensor_ring.ops.boundaries import check_integers
from dtensor_ring.ops.checks import CALLER, LOG, announce, check_inputs, loadable, unit_stride
from dtensor_ring.ops.options import LEAVES, SCHEMA, Call, PlanRequest, unflatten
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.slices import slices_of
from dtensor_ring.ring import ring_backward, ring_forward, ring_sinks
from dtensor_ring.transport.transport import TransferPolicy, Transport, transport_of


def forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Run the ring op on plain tensors."""
    return run_forward(bound_call(options, query, key, value), query, key, value)


def run_forward(
    bound: BoundCall, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a bound call on plain tensors."""
    if not bound.is_shared:  # nobody to agree with
        return _forward(bound, query, key, value, None)
    group = bound.call.group
    with checked_call(bound, group, query, value) as transport:
        # Within the context: an error of this rank is reported to the others.
        out, lse = _forward(bound, query, key, value, transport)
    group_state_of(group).remember(lse)
    return out, lse


def _forward(
    bound: BoundCall, query: Tensor, key: Tensor, value: Tensor, transport: Transport | None
) -> tuple[Tensor, Tensor]:
    """Run the forward of a call; its `transport` may be `None` on a ring of one rank."""
    call = bound.call
    kernel = bound.kernel(query, key, value)
    sole = bound.sole(kernel, query, key)
    # Before the kernel runs, so that the log names it if it fails.
    if LOG.isEnabledFor(logging.INFO):
        announce(call, bound.request, bound.plan(query, key), kernel.name, key, value)
    query, key, value = loadable(query, key, value)
    if sole is not None:
        return sole_forward(query, (key, value), sole, kernel, call.scores)
    return ring_forward(
        query,
        (key, value),
        plan=bound.plan(query, key),
        kernel=kernel,
        scores=call.scores,
        transport=transport or transport_of(call.group),
        policy=call.place.policy,
        rounded=call.rounded,
    )


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the ring's backward op on plain tensors."""
    saved = Saved(grad_out, out, lse, grad_lse)
    bound = bound_call(options, query, key, value)
    dq, dk, dv, grad_sinks = run_backward(bound, saved, query, key, value)
    # An op cannot return nothing.
    return dq, dk, dv, query.new_empty(0) if grad_sinks is None else grad_sinks


def run_backward(
    bound: BoundCall, saved: Saved, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run the backward of a bound call on plain tensors; without sinks their gradient is `None`."""
    if not bound.is_shared:
        return _backward(bound, saved, query, key, value, None)
    with checked_call(bound, bound.call.group, query, value, saved.lse) as transport:
        return _backward(bound, saved, query, key, value, transport)


def _backward(
    bound: BoundCall,
    saved: Saved,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    transport: Transport | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run the backward of a call, see `_forward`."""
    call = bound.call
    kernel = bound.kernel(query, key, value, saved.grad_lse is not None)
    sole = bound.sole(kernel, query, key)
    grad_out, query, key, value, out = loadable(saved.grad_out, query, key, value, saved.out)
    # Most calls need no copy, and keep what was saved as it is.
    if grad_out is not saved.grad_out or out is not saved.out:
        saved = Saved(grad_out, out, saved.lse, saved.grad_lse)
    if sole is not None:
        return *sole_backward(saved, query, (key, value), sole, kernel, call.scores), None
    plan, transport = bound.plan(query, key), transport or transport_of(call.group)
    scores, policy = call.scores, call.place.policy
    grads = ring_backward(
        saved, query, (key, value), plan, kernel, scores, transport, policy, call.rounded
    )
    sinks = scores.sinks
    return *grads, None if sinks is None else ring_sinks(saved, sinks, plan, transport)


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    call = unflatten(options)
    check_inputs(query, key, value, call.scores.sinks, may_be_biased=True)
    check_batch(query, call.batch)
    wide = torch.promote_types(query.dtype, torch.float32)
    # `Partial.result` returns a contiguous lse.
    lse = query.new_empty(query.shape[:3], dtype=wide)
    # Compilers rely on the fake's strides, so they must be those of the implementation.
    (query,) = unit_stride(query)
    out = empty(query, (*query.shape[:3], value.shape[3]), order_of(query))
    return out, lse


def check_batch(query: Tensor, batch: Any) -> None:
    """Refuse meta boundaries beside real tensors: the fake would return uninitialized results.

    Args:
        query: the call's query.
        batch: the call's integer tensors, a named tuple.

    Raises:
        ValueError: names the option.
    """
    for name, x in batch._asdict().items():
        if x is not None and query.device.type != "meta":
            check_integers(x, name)


def _fake_backward(
    grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = unflatten(rest[2:]).scores.sinks  # `rest` begins with out and lse
    # The memory order must be that of `GradientSum.result`.
    grads = [empty(x, x.shape, TOKEN_MAJOR) for x in (query, key, value)]
    grad_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return grads[0], grads[1], grads[2], grad_sinks


def checked_call(
    bound: BoundCall,
    group: ProcessGroup,
    query: Tensor,
    value: Tensor,
    lse: Tensor | None = None,
) -> TransportContext:
    """Return the context of a call that ranks compare, which gives its transport.

    Args:
        bound: the call.
        group: its group.
        query: this rank's queries.
        value: this rank's values.
        lse: the lse that the forward call returned, if this is its backward call.
    """
    forward_call = 0 if lse is None else group_state_of(group).forward_call_of(lse)
    direction = "forward" if lse is None else "backward"
    record = bound.records.get(direction)
    if record is None:
        record = bound.records[direction] = _record(bound, direction, query, value)
    return checked_transport(group, record, direction, query.device, forward_call, CALLER.site)


def _record(bound: BoundCall, direction: str, query: Tensor, value: Tensor) -> CallRecord:
    call, request = bound.call, bound.request
    heads = query.shape[1], value.shape[1]
    if request.strategy.heads > 1:
        heads = 0, 0  # the ranks of a group may have different numbers of heads
    facts = attention_facts(direction, query, value, call.scores, heads)
    return ring_record(facts, call.place.policy, call.place.machine, request)


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda record: 4 * MAX_BYTES)
def ring_record(
    attention: AttentionFacts,
    policy: TransferPolicy,
    machine: str | None,
    request: PlanRequest,
) -> CallRecord:
    """Return the record of a call."""
    own: dict[str, object] = {
        "tokens of keys": request.key_seq_len,
        "strategy": request.strategy.spec,
        "machine": machine or "none",
        "policy": policy,
        "key_cu_seqlens": boundaries_text(request.key_documents),
        "runs": runs_text(request.layout),
        "key_runs": runs_text(request.key_layout),
    }
    return record_of(attention, request, own)


_SINKS = nodes.place_of_sinks(LEAVES)


class _RingFunction(nodes.Node):
    """The autograd node of a call.

    We do not use `torch.library.register_autograd`: it compares every argument of the schema with
    every other one, and with this many arguments that dominates the host time of a call. For the
    same reason the options are one argument. Only the sinks among them have a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Any,
        keyset: Any,
        options: Any,
    ) -> tuple[Tensor, Tensor]:
        inputs = query, key, value, *options
        output = nodes.below_autograd(ring_op, forward, keyset, *inputs, of_node=True)
        ctx.set_materialize_grads(False)
        # Tensors are saved, so that hooks (offloading, checkpointing) see them.
        ctx.options, ctx.places = options, [i for i in TENSORS if options[i] is not None]
        ctx.save_for_backward(query, key, value, *output, *[options[i] for i in ctx.places])
        if ctx.places:
            ctx.options = [None if i in ctx.places else x for i, x in enumerate(options)]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_out, grad_lse = grads
        if grad_out is None and grad_lse is None:
            return (None,) * 6
        query, key, value, out, lse, *others = ctx.saved_tensors
        options = ctx.options
        if others:
            options = list(options)
            for i, x in zip(ctx.places, others, strict=True):
                options[i] = x
        # Only lse was used: the formula still takes a gradient of out.
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if torch.is_grad_enabled() or not nodes.is_plain(grad_out, query, out):
            inputs = grad_out, grad_lse, query, key, value, out, lse
            return *_dispatched_backward(inputs, options), None, None
        bound, saved = bound_call(options, query, key, value), Saved(grad_out, out, lse, grad_lse)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return *run_backward(bound, saved, query, key, value), None, None


class _BoundFunction(nodes.Node):
    """The autograd node of a bound call of plain tensors: autograd looks at four arguments only."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: tuple[BoundCall, bool]
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.bound, with_lse = how
        with torch._C._AutoDispatchBelowADInplaceOrView():  # see `nodes.below_autograd`
            out, lse = run_forward(ctx.bound, query, key, value)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, out, lse)
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_out, grad_lse = grads if len(grads) == 2 else (grads[0], None)
        if grad_out is None and grad_lse is None:
            return (None,) * 4
        query, key, value, out, lse = ctx.saved_tensors
        bound = ctx.bound
        if grad_out is None:  # as in `_RingFunction`
            grad_out = torch.zeros_like(out)
        # What was saved is plain, but a compiler that follows backward sees its gradients.
        if torch.is_grad_enabled() or not nodes.is_plain(grad_out):
            inputs = grad_out, grad_lse, query, key, value, out, lse
            return _dispatched_backward(inputs, bound.options)
        saved = Saved(grad_out, out, lse, grad_lse)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return run_backward(bound, saved, query, key, value)


def _dispatched_backward(
    inputs: tuple[Any, ...], options: Sequence[Any]
) -> tuple[Any, Any, Any, Any]:
    """Run the backward op by the dispatcher; the gradient of the sinks is `None` without them."""
    # Without `create_graph` nothing is recorded: autograd need not look at the arguments.
    with nullcontext() if torch.is_grad_enabled() else torch._C._AutoDispatchBelowAutograd():
        *of_inputs, of_sinks = ring_backward_op(*inputs, *options)
    # Without sinks their gradient is an empty tensor.
    return *of_inputs, None if options[_SINKS] is None else of_sinks


def attend(
    query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Run the ring op: by the dispatcher, unless that would only convert the arguments."""
    sinks = options[_SINKS]
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    if torch.compiler.is_compiling() or not nodes.is_plain(*inputs):
        return ring_op(query, key, value, *options)
    return _autograd(nodes.PLAIN, query, key, value, *options)


def attend_bound(
    bound: BoundCall, query: Tensor, key: Tensor, value: Tensor, with_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a bound call as `attend` does, and return `out`, with lse if that is asked for."""
    if forward_ad._current_level >= 0 or not nodes.is_plain(query, key, value):
        found = ring_op(query, key, value, *bound.options)
    elif torch.is_grad_enabled() and torch._C._any_requires_grad(query, key, value):
        node: Any = _BoundFunction  # no transform is active, see `nodes.recorded`
        return node.apply(query, key, value, (bound, with_lse))
    else:
        with torch._C._AutoDispatchBelowADInplaceOrView():  # see `nodes.below_autograd`
            found = run_forward(bound, query, key, value)
    return found if with_lse else found[0]


def _autograd(
    keyset: Any, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    # Inference needs no node, so it does not pay for saving tensors.
    sinks = options[_SINKS]
    if forward_ad._current_level >= 0:
        nodes.refuse_tangents((query, key, value, sinks))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(query, key, value, sinks):
        return nodes.recorded(_RingFunction, query, key, value, sinks, keyset, options)
    return nodes.below_autograd(ring_op, forward, keyset, query, key, value, *options)


class _BackwardFunction(nodes.Node):
    """The autograd node of a backward call, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
        return nodes.below_autograd(ring_backward_op, backward, keyset, *inputs, of_node=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(nodes.ONCE)


def _backward_autograd(keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return nodes.recorded(_BackwardFunction, keyset, *inputs)
    return nodes.below_autograd(ring_backward_op, backward, keyset, *inputs)


def _forward_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> int:
    """Count two products, each with 2 flops per visible pair and head dim."""
    head_dim, value_head_dim = number_of(key.shape[3]), number_of(value.shape[3])
    return 2 * _visible_pairs(query, key, unflatten(rest)) * (head_dim + value_head_dim)


def _backward_flops(
    grad_out: Any, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any
) -> int:
    """Count five products: the recomputed scores, and gradients of scores, query, key, value."""
    pairs = _visible_pairs(query, key, unflatten(rest[2:]))
    head_dim, value_head_dim = number_of(key.shape[3]), number_of(value.shape[3])
    return 2 * pairs * (3 * head_dim + 2 * value_head_dim)


def _visible_pairs(query: Tensor, key: Tensor, call: Call) -> int:
    """Count the scored pairs of query and key, over batch and heads.

    Plain tensors count the pairs of this rank. DTensors count those of all ranks, as torch does for
    products of DTensors. A compiler knows only lengths: it counts an even share, equal on all
    ranks, of the pairs without boundaries.
    """
    batch, heads = map(number_of, query.shape[:2])
    is_placed = call.place.group_name is not None
    is_known = not any(isinstance(x, FakeTensor) for x in (query, *call.batch))
    if is_placed and is_known:
        # Plain tensors: this rank's plan gives the exact number.
        tiles = (
            tile
            for step in call.request(query.shape[0]).plan(query, key).steps
            for tile in step.tiles
        )
        return heads * sum(tile.area * (batch if tile.batch is None else 1) for tile in tiles)
    # After an all-to-all, each rank of a group has a part of the heads.
    num_parts = call.group.size() // call.strategy.heads if is_placed else 1
    num_queries, num_keys = _lengths(query, key, call, num_parts)
    # With `key_runs`, the queries are the last tokens of a longer sequence.
    begin = 0 if call.batch.key_runs is None else max(0, num_keys - num_queries)
    slices = call.slices(batch) if is_known else None
    if slices is None:
        of_queries, of_keys = call.documents(batch) if is_known else (None, None)
        ends = begin + num_queries, num_keys
        slices = slices_of(call.scores.mask, ends, of_queries, of_keys)
    pairs = visible_pairs(slices, (begin, begin + num_queries))
    # Slices per batch row are already summed over the rows.
    return heads * pairs * (1 if len(slices) > 1 else batch) // num_parts


def _lengths(query: Tensor, key: Tensor, call: Call, num_parts: int) -> tuple[int, int]:
    """Return the global lengths; if only runs say them, assume parts of equal length."""
    place = call.place
    if place.seq_len is not None and place.key_seq_len is not None:
        return number_of(place.seq_len), number_of(place.key_seq_len)
    return number_of(query.shape[2]) * num_parts, number_of(key.shape[2]) * num_parts


def number_of(length: Any) -> int:
    """Return a length, or the compiler's hint of a symbolic one, 0 without a hint."""
    # `int(length)` would add a guard, and each length would recompile the graph.
    example = length.node.hint if isinstance(length, torch.SymInt) else length
    return 0 if example is None else int(example)


ring_op = nodes.register_op(
    "ring_attention",
    f"(Tensor query, Tensor key, Tensor value, {SCHEMA}) -> (Tensor out, Tensor lse)",
    forward,
    _fake_forward,
    autograd=_autograd,
    num_cast=3,
    flops=_forward_flops,
)
ring_backward_op = nodes.register_op(
    "ring_attention_backward",
    "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor lse, {SCHEMA}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)",
    backward,
    _fake_backward,
    autograd=_backward_autograd,
    num_cast=0,
    flops=_backward_flops,
)
