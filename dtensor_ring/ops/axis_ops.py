"""Ops over an axis: gather rows of all ranks, sum them back, sum a tensor, and pass on states.

A rank's rows are its part. The gather and the sum of parts are each other's backward. Parts may
differ in rows, and a rank may have none. The backward of a sum over ranks is also a sum over ranks.
Each rank sends its data directly to the ranks that need it, in one message to each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.agreement.call_record import CallRecord
from dtensor_ring.agreement.checked_transport import TransportContext, checked_transport
from dtensor_ring.agreement.group_state import group_state_of
from dtensor_ring.compute.trace import Label
from dtensor_ring.ops import nodes
from dtensor_ring.ops.checks import CALLER
from dtensor_ring.ops.nodes import register_op
from dtensor_ring.transport.transport import P2P, Chain, Transport, is_plain, transport_of


def gather_rows(part: Tensor, rows: Sequence[int], rank: int, group_name: str) -> Tensor:
    """Concatenate the parts of all ranks in rank order, `(T, H)` on each rank.

    Args:
        part: this rank's part, `(rows[rank], H)`.
        rows: the number of rows of each rank's part.
        rank: this rank.
        group_name: the process group.

    Raises:
        RingError: on every rank, if they differ in the rows, the width or the dtype.
    """
    group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
    whole = part.new_empty(sum(rows), part.shape[1])
    parts, part = whole.split(list(rows)), part.contiguous()
    with _checked(group, "gather_rows", part, rows) as transport:
        if len(part) != rows[rank]:  # within the context, which reports it to the others
            raise ValueError(f"a part of {len(part)} rows came where {rows[rank]} were announced")
        _move_rows(transport, rank, parts, [part] * len(rows))
        parts[rank].copy_(part)
    return whole


def sum_rows(whole: Tensor, rows: Sequence[int], rank: int, group_name: str) -> Tensor:
    """Sum a tensor over the ranks and return this rank's rows of it, `(rows[rank], H)`.

    Args:
        whole: this rank's summand, `(T, H)`.
        rows: the number of rows of each rank's part.
        rank: this rank.
        group_name: the process group.

    Raises:
        RingError: on every rank, if they differ in the rows, the width or the dtype.
    """
    group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
    whole = whole.contiguous()
    parts = whole.split(list(rows))
    found = whole.new_empty((len(rows), *parts[rank].shape))
    found[rank].copy_(parts[rank])
    with _checked(group, "sum_rows", whole, rows) as transport:
        _move_rows(transport, rank, found.unbind(), parts)
    # Summing in rank order makes runs reproducible; 16-bit dtypes are rounded once.
    wide = torch.promote_types(whole.dtype, torch.float32)
    return found.sum(0, dtype=wide).to(whole.dtype)


def sum_ranks(
    local: Tensor, group_name: str, is_back: bool = False, forward_call: int = 0
) -> Tensor:
    """Sum a tensor over the ranks and return the sum on each rank.

    Args:
        local: this rank's summand, with the same shape on all ranks.
        group_name: the process group.
        is_back: whether backward makes this call.
        forward_call: the number of the forward call that this is the backward of; 0 if unknown.

    Raises:
        RingError: on every rank, if they differ in the number of elements or in the dtype.
        NotImplementedError: if PyTorch does not sum the dtype.
    """
    group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
    rank, size = group.rank(), group.size()
    with _checked_sum(group, local, is_back, forward_call) as transport:
        found = parts_of_ranks(local, rank, size, transport)
    # All ranks sum in the same order, so their results are bitwise equal.
    return found.sum(0)


def parts_of_ranks(local: Tensor, rank: int, size: int, transport: Transport) -> Tensor:
    """Return the tensors of all ranks, `(W, ...)`, each as large as this rank's."""
    found = local.new_empty((size, *local.shape))
    found[rank].copy_(local)
    parts = found.view(size, -1).unbind()
    _move_rows(transport, rank, parts, [parts[rank]] * size)
    return found


def _checked_sum(
    group: ProcessGroup, x: Tensor, is_back: bool, forward_call: int
) -> TransportContext:
    """Return the transport of a sum over ranks; it checks that all ranks make the same call."""
    if group.size() == 1:
        return nullcontext(transport_of(group))  # nobody to agree with
    call_site, transport = CALLER.site, transport_of(group)
    direction = "sum back" if is_back else "sum"
    fields = {
        "direction": direction,
        "transport": "that of the group" if is_plain(transport, x.device) else "another one",
        "device": x.device.type,
        "dtypes": str(x.dtype),
        "numbers to sum": str(x.numel()),
    }
    return checked_transport(
        group,
        CallRecord(fields),
        direction,
        x.device,
        forward_call=forward_call,
        call_site=call_site,
        first_bytes=x.nbytes,
        transport=transport,
    )


def _checked(group: ProcessGroup, op: str, x: Tensor, rows: Sequence[int]) -> TransportContext:
    """Return the transport of a call; it checks that all ranks make the same call."""
    if group.size() == 1:
        return nullcontext(transport_of(group))  # nobody to agree with
    facts = {"op": op, "dtype": x.dtype, "device": x.device.type, "width": x.shape[1]}
    fields = {name: str(value) for name, value in (facts | {"rows": tuple(rows)}).items()}
    return checked_transport(
        group, CallRecord({"direction": "forward"} | fields), "forward", x.device
    )


def _move_rows(
    transport: Transport, rank: int, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]
) -> None:
    """Receive a dense tensor from each other rank and send one to each; skip empty tensors."""
    transport.prepare(incoming[rank].device)
    transport.at(Label("parts", 0, 0))
    receives, sends = [], []
    for peer in range(len(incoming)):
        if peer == rank:
            continue
        # Both ranks know who has rows, so none waits for an empty message.
        if incoming[peer].numel():
            receives.append(P2P(incoming[peer].view(-1), peer))
        if outgoing[peer].numel():
            sends.append(P2P(outgoing[peer].view(-1), peer))
    for work in transport.start(receives, sends):
        work.wait()


def _fake_gather(part: Tensor, rows: Sequence[int], rank: int, group_name: str) -> Tensor:
    return part.new_empty(sum(rows), part.shape[1])


def _fake_sum(whole: Tensor, rows: Sequence[int], rank: int, group_name: str) -> Tensor:
    return whole.new_empty(rows[rank], whole.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place = inputs[1:]


def _sum_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, rank, group_name = ctx.place
    return sum_rows_op(grad, rows, rank, group_name), None, None, None


def _gather_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, rank, group_name = ctx.place
    return gather_rows_op(grad, rows, rank, group_name), None, None, None


_ROWS = "int[] rows, int rank, str group_name"
gather_rows_op = register_op(
    "gather_rows",
    f"(Tensor part, {_ROWS}) -> Tensor",
    gather_rows,
    _fake_gather,
    gradient=(_sum_gradient, _keep),
)
sum_rows_op = register_op(
    "sum_rows",
    f"(Tensor whole, {_ROWS}) -> Tensor",
    sum_rows,
    _fake_sum,
    gradient=(_gather_gradient, _keep),
)


def _fake_sum_ranks(
    local: Tensor, group_name: str, is_back: bool = False, forward_call: int = 0
) -> Tensor:
    return local.new_empty((1, *local.shape)).sum(0)


class _SumFunction(nodes.Node):
    """The autograd node of a sum over ranks.

    Autograd passes zeros where it has no gradient, and backward must run: DDP gives no gradient to
    unused outputs, but the other ranks wait for this one.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, keyset: Any, group_name: str, is_back: bool, forward_call: int
    ) -> Tensor:
        total = nodes.below_autograd(
            sum_ranks_op, sum_ranks, keyset, local, group_name, is_back, forward_call, of_node=True
        )
        ctx.place, ctx.number = (group_name, is_back, forward_call), 0
        # A compiler only traces: there is no call, and no number of it.
        if nodes.is_plain_call(keyset):
            group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
            ctx.number = group_state_of(group).number
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        group_name, is_back, forward_call = ctx.place
        number = 0 if forward_call else ctx.number
        total = sum_ranks_op(grads[0], group_name, not is_back, number)
        return total, None, None, None, None


def _recorded_sum(
    keyset: Any, local: Tensor, group_name: str, is_back: bool = False, forward_call: int = 0
) -> Tensor:
    if forward_ad._current_level >= 0:
        nodes.refuse_tangents((local,))
    if torch.is_grad_enabled() and local.requires_grad:
        return nodes.recorded(_SumFunction, local, keyset, group_name, is_back, forward_call)
    return nodes.below_autograd(
        sum_ranks_op, sum_ranks, keyset, local, group_name, is_back, forward_call
    )


sum_ranks_op = register_op(
    "sum_ranks",
    "(Tensor local, str group_name, bool is_back=False, int forward_call=0) -> Tensor",
    sum_ranks,
    _fake_sum_ranks,
    autograd=_recorded_sum,
)


# Note [Order of states]: a layer receives, computes, and sends. So its states pass from rank to
# rank, while other ranks are in layers before or after it. The backward of a receive is a send in
# the other direction, and the backward of a send is a receive. Neither direction can deadlock.
# Within a layer, the send's backward runs before the receive's, because the sent state was computed
# from the received one. Between layers, a receive's backward runs before that of the layer before
# it, because the receive takes this layer's input as its `anchor`.
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
            _pass_on(transport, [P2P(state.view(-1), peer)], [])
        else:
            # Nobody is before the first rank: its tokens begin from zero.
            state.zero_()
    return state


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
            _pass_on(transport, [], [P2P(state.contiguous().view(-1), peer)])
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


def _pass_on(transport: Transport, receives: list[P2P], sends: list[P2P]) -> None:
    transport.at(Label("state", 0, 0))
    for work in transport.start(receives, sends):
        work.wait()


def _empty(anchor: Tensor, rows: int, numbers: int) -> Tensor:
    """Allocate a state in float32 or wider, because states are sums over many tokens."""
    dtype = torch.promote_types(anchor.dtype, torch.float32)
    return anchor.new_empty((rows, numbers), dtype=dtype)


def _fake_receive(anchor: Tensor, rows: int, numbers: int, step: int, group_name: str) -> Tensor:
    return _empty(anchor, rows, numbers)


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
    rows, numbers = ctx.shape
    return receive_op(anchor, rows, numbers, -ctx.step, ctx.group_name), None, None


receive_op = register_op(
    "receive_state",
    "(Tensor anchor, SymInt rows, SymInt numbers, int step, str group_name) -> Tensor",
    receive,
    _fake_receive,
    gradient=(_send_gradient, _keep_place),
)
send_op = register_op(
    "send_state",
    "(Tensor state, int step, str group_name) -> Tensor",
    send,
    _fake_send,
    gradient=(_receive_gradient, _keep_shape),
)


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
