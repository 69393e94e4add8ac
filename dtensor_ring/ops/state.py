"""Ops that pass a layer's state from the rank with earlier tokens to the next rank.

Note [Order of states]: a layer receives, computes, and sends. So its states pass from rank to rank,
while other ranks are in layers before or after it. The backward of a receive is a send in the other
direction, and the backward of a send is a receive. Neither direction can deadlock. Within a layer,
the send's backward runs before the receive's, because the sent state was computed from the received
one. Between layers, a receive's backward runs before that of the layer before it, because the
receive takes this layer's input as its `anchor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.agreement.call_record import CallRecord
from dtensor_ring.agreement.checked_transport import checked_transport
from dtensor_ring.compute.trace import Label
from dtensor_ring.ops.call_site import CALLER
from dtensor_ring.ops.nodes import register_gradient
from dtensor_ring.transport.transport import P2P, Chain, Transport, transport_of

RECEIVE = "dtensor_ring::receive_state"
SEND = "dtensor_ring::send_state"

torch.library.define(
    RECEIVE, "(Tensor anchor, SymInt rows, SymInt numbers, int step, str group_name) -> Tensor"
)
torch.library.define(SEND, "(Tensor state, int step, str group_name) -> Tensor")
receive_op = torch.ops.dtensor_ring.receive_state.default
send_op = torch.ops.dtensor_ring.send_state.default


@torch.library.impl(RECEIVE, "CompositeExplicitAutograd")
def receive(anchor: Tensor, rows: int, numbers: int, step: int, group_name: str) -> Tensor:
    """Receive `(rows, numbers)` from the rank `step` before this one; zeros without such a rank.

    Args:
        anchor: decides dtype, device and when the backward runs; it gets no gradient.
        rows: the number of batch rows.
        numbers: the size of a row's state.
        step: 1 along the ranks, -1 against them.
        group_name: the process group.
    """
    group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
    state = _empty(anchor, rows, numbers)
    peer = group.rank() - step
    with _state_transport(group, "receive_state", state, step) as transport:
        if 0 <= peer < group.size():
            _move(transport, [P2P(state.view(-1), peer)], [])
        else:
            state.zero_()
    return state


@torch.library.impl(SEND, "CompositeExplicitAutograd")
def send(state: Tensor, step: int, group_name: str) -> Tensor:
    """Send a state to the rank `step` after this one, if there is one.

    Args:
        state: `(rows, numbers)`, float32 or float64.
        step: 1 along the ranks, -1 against them.
        group_name: the process group.

    Returns:
        An empty tensor. Results computed from it make the backward run, see `attached`.
    """
    group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
    peer = group.rank() + step
    with _state_transport(group, "send_state", state, step) as transport:
        if 0 <= peer < group.size():
            _move(transport, [], [P2P(state.contiguous().view(-1), peer)])
    return state.new_empty(0)


@contextmanager
def _state_transport(group: ProcessGroup, op: str, state: Tensor, step: int) -> Iterator[Transport]:
    """Give the transport of a call. Call records follow the states, so ranks cannot deadlock."""
    if group.size() == 1:
        yield transport_of(group)
        return
    rows, numbers = state.shape
    facts = {"dtype": state.dtype, "device": state.device.type, "rows": rows, "numbers": numbers}
    fields = {name: str(x) for name, x in (facts | {"step": step}).items()}
    # A send and its receive are different calls, so both must derive the same tag.
    chain = Chain(step, CallRecord(fields).tag(0, 0))
    direction = "forward" if step > 0 else "backward"
    record = CallRecord({"direction": direction, "op": op} | fields)
    how = {"call_site": CALLER.site, "chain": chain}
    with checked_transport(group, record, direction, state.device, **how) as transport:
        # On ranks without a peer, too: the first call may need all ranks, and a rank that waits
        # for them in its receive has not begun to send what the next one waits for.
        transport.prepare(state.device)
        yield transport


def _move(transport: Transport, receives: list[P2P], sends: list[P2P]) -> None:
    transport.at(Label("state", 0, 0))
    for work in transport.start(receives, sends):
        work.wait()


def _empty(anchor: Tensor, rows: int, numbers: int) -> Tensor:
    """Allocate a state in float32 or wider, because states are sums over many tokens."""
    dtype = torch.promote_types(anchor.dtype, torch.float32)
    return anchor.new_empty((rows, numbers), dtype=dtype)


@torch.library.register_fake(RECEIVE)
def _fake_receive(anchor: Tensor, rows: int, numbers: int, step: int, group_name: str) -> Tensor:
    return _empty(anchor, rows, numbers)


@torch.library.register_fake(SEND)
def _fake_send(state: Tensor, step: int, group_name: str) -> Tensor:
    return state.new_empty(0)


def _keep_place(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.step, ctx.group_name = inputs[-2:]


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _keep_place(ctx, inputs, output)
    ctx.shape = inputs[0].shape
    # Checkpointing recomputes up to the last saved tensor. Save one here, to include the send.
    ctx.save_for_backward(output)


def _send_gradient(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    send_op(grad, -ctx.step, ctx.group_name)
    return (None,) * 5


def _receive_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (anchor,) = ctx.saved_tensors
    return receive_op(anchor, *ctx.shape, -ctx.step, ctx.group_name), None, None


register_gradient(RECEIVE, _send_gradient, _keep_place)
register_gradient(SEND, _receive_gradient, _keep_shape)


def attached(x: Tensor, token: Tensor) -> Tensor:
    """Return the same tensor; its backward runs before that of the op that made the token."""
    return _Attached.apply(x, token) if token.requires_grad else x


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, token: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (token,) = ctx.saved_tensors
        return grads[0], torch.zeros_like(token)
