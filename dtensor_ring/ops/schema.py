"""The registered ring ops: schemas, implementations and fake kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor_ring.agreement.session import session_of
from dtensor_ring.compute.kernels import Saved
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty, order_of
from dtensor_ring.compute.sinks import sinks_gradient
from dtensor_ring.ops.announce import announce
from dtensor_ring.ops.boundaries import check_integers
from dtensor_ring.ops.check import check_inputs
from dtensor_ring.ops.options import SCHEMA, unflatten
from dtensor_ring.ops.scattered import warn_of_tiles
from dtensor_ring.ops.strides import loadable, unit_stride
from dtensor_ring.ops.word import agreed_call
from dtensor_ring.ring import ring_backward, ring_forward

FORWARD = "dtensor_ring::ring_attention"
BACKWARD = "dtensor_ring::ring_attention_backward"

torch.library.define(
    FORWARD, f"(Tensor query, Tensor key, Tensor value, {SCHEMA}) -> (Tensor out, Tensor lse)"
)
torch.library.define(
    BACKWARD,
    "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor lse, {SCHEMA}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)",
)
ring_op = torch.ops.dtensor_ring.ring_attention.default
ring_backward_op = torch.ops.dtensor_ring.ring_attention_backward.default


def forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Run the ring op on plain tensors."""
    call = unflatten(options)
    check_inputs(query, key, value, call.scores.sinks)
    question = call.question(query.shape[0])
    with agreed_call(call, question, query, value) as transport:
        # Within the context: an error of this rank is reported to the others.
        plan, kernel = question.plan(query, key), call.select(query, value, question.slices)
        warn_of_tiles(plan, question)
        announce(call, question, plan, kernel.name, key, value)
        query, key, value = loadable(query, key, value)
        out, lse = ring_forward(
            *(query, (key, value), plan, kernel, call.scores, transport, call.place.policy)
        )
    if question.world_size > 1:
        session_of(call.group).remember(lse)
    return out, lse


torch.library.impl(FORWARD, "CompositeExplicitAutograd")(forward)


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
    call = unflatten(options)
    question = call.question(query.shape[0])
    with agreed_call(call, question, query, value, lse) as transport:
        plan = question.plan(query, key)
        kernel = call.select(query, value, question.slices, grad_lse is not None)
        grad_out, query, key, value, out = loadable(grad_out, query, key, value, out)
        saved = Saved(grad_out, out, lse, grad_lse)
        grads = ring_backward(
            *(saved, query, (key, value), plan, kernel, call.scores),
            *(transport, call.place.policy),
        )
    return *grads, sinks_gradient(saved, call.scores.sinks)


torch.library.impl(BACKWARD, "CompositeExplicitAutograd")(backward)


@torch.library.register_fake(FORWARD)
def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    call = unflatten(options)
    check_inputs(query, key, value, call.scores.sinks)
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


@torch.library.register_fake(BACKWARD)
def _fake_backward(
    grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = unflatten(rest[2:]).scores.sinks  # `rest` begins with out and lse
    # The memory order must be that of `GradientSum.result`.
    grads = [empty(x, x.shape, TOKEN_MAJOR) for x in (query, key, value)]
    grad_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return grads[0], grads[1], grads[2], grad_sinks
