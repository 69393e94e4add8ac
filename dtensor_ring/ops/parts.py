"""Rows that ranks have made, gathered on all of them and summed back, and sums over all ranks.

A gather and a sum of parts are each other's backward. Parts may differ in rows, and a rank may have
none. The backward of a sum over ranks is such a sum, too. What a rank has goes straight to the
ranks that want it, one message to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.agreement.checked_transport import TransportContext, agreed_transport
from dtensor_ring.agreement.record import Word
from dtensor_ring.agreement.session import session_of
from dtensor_ring.compute.trace import Label
from dtensor_ring.ops.autograd import below_autograd, is_plain_call, refuse_tangents
from dtensor_ring.ops.caller import CALLER
from dtensor_ring.ops.transforms import LIBRARY, recorded, register_gradient, register_samples
from dtensor_ring.transport.transport import P2P, Transport, is_plain, transport_of

GATHER = "dtensor_ring::gather_parts"
SUM = "dtensor_ring::sum_parts"
SUM_RANKS = "dtensor_ring::sum_ranks"

torch.library.define(GATHER, "(Tensor part, int[] rows, int rank, str group_name) -> Tensor")
torch.library.define(SUM, "(Tensor whole, int[] rows, int rank, str group_name) -> Tensor")
torch.library.define(
    SUM_RANKS, "(Tensor local, str group_name, bool is_back=False, int origin=0) -> Tensor"
)
gather_parts_op = torch.ops.dtensor_ring.gather_parts.default
sum_parts_op = torch.ops.dtensor_ring.sum_parts.default
sum_ranks_op = torch.ops.dtensor_ring.sum_ranks.default


@torch.library.impl(GATHER, "CompositeExplicitAutograd")
def gather_parts(part: Tensor, rows: Sequence[int], rank: int, group_name: str) -> Tensor:
    """All parts below one another, in the order of the ranks, `(T, H)` on each of them.

    Args:
        part: of this rank, `(rows[rank], H)`.
        rows: of each rank's part.
        rank: this one.
        group_name: of the ranks.

    Raises:
        RingError: on every rank, if they differ in the rows, the width or the dtype.
    """
    group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
    whole = part.new_empty(sum(rows), part.shape[1])
    parts, part = whole.split(list(rows)), part.contiguous()
    with _agreed(group, "gather_parts", part, rows) as transport:
        if len(part) != rows[rank]:  # within the context, so that the others are told
            raise ValueError(f"a part of {len(part)} rows came where {rows[rank]} were announced")
        _move(transport, rank, parts, [part] * len(rows))
        parts[rank].copy_(part)
    return whole


@torch.library.impl(SUM, "CompositeExplicitAutograd")
def sum_parts(whole: Tensor, rows: Sequence[int], rank: int, group_name: str) -> Tensor:
    """This rank's rows, `(rows[rank], H)`, of the sum over the ranks of what each has of the whole.

    Args:
        whole: of this rank, `(T, H)`.
        rows: of each rank's part.
        rank: this one.
        group_name: of the ranks.

    Raises:
        RingError: on every rank, if they differ in the rows, the width or the dtype.
    """
    group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
    whole = whole.contiguous()
    parts = whole.split(list(rows))
    found = whole.new_empty(len(rows), *parts[rank].shape)
    found[rank].copy_(parts[rank])
    with _agreed(group, "sum_parts", whole, rows) as transport:
        _move(transport, rank, found.unbind(), parts)
    # In the order of the ranks, so that it is the same in every run; 16 bits are rounded once.
    wide = torch.promote_types(whole.dtype, torch.float32)
    return found.sum(0, dtype=wide).to(whole.dtype)


def sum_ranks(local: Tensor, group_name: str, is_back: bool = False, origin: int = 0) -> Tensor:
    """The sum of a tensor over the ranks, on each of them.

    Args:
        local: of this rank, of one shape on all of them.
        group_name: of the ranks.
        is_back: whether backward makes this call.
        origin: number of the forward call that this is the backward call of; 0 if not known.

    Raises:
        RingError: on every rank, if they differ in the number of elements or in the dtype.
        NotImplementedError: if PyTorch does not sum the dtype.
    """
    group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
    rank, size = group.rank(), group.size()
    found = local.new_empty(size, *local.shape)
    found[rank].copy_(local)
    flat = [part.view(-1) for part in found.unbind()]
    with _agreed_sum(group, local, is_back, origin) as transport:
        _move(transport, rank, flat, [flat[rank]] * size)
    # Each rank sums all parts in one order, so that the results are equal to the last bit.
    return found.sum(0)


torch.library.impl(SUM_RANKS, "CompositeExplicitAutograd")(sum_ranks)


def _agreed_sum(group: ProcessGroup, x: Tensor, is_back: bool, origin: int) -> TransportContext:
    """The transport of a sum over ranks, which the ranks have to make alike."""
    transport = transport_of(group)
    if group.size() == 1:
        return nullcontext(transport)  # nobody to agree with
    direction = "sum back" if is_back else "sum"
    # An exchange of one head has the same fields, so that errors of both say what differs.
    fields = {
        "direction": direction,
        "transport": "that of the group" if is_plain(transport, x.device) else "another one",
        "device": x.device.type,
        "dtypes": str(x.dtype),
        "head dims": str([x.numel()]),
    }
    how = {"origin": origin, "where": CALLER.where, "first_bytes": x.nbytes}
    return agreed_transport(group, Word(fields), direction, x.device, **how)


def _agreed(group: ProcessGroup, op: str, x: Tensor, rows: Sequence[int]) -> TransportContext:
    """The transport of a call, which the ranks have to make alike."""
    if group.size() == 1:
        return nullcontext(transport_of(group))  # nobody to agree with
    facts = {"op": op, "dtype": x.dtype, "device": x.device.type, "width": x.shape[1]}
    fields = {name: str(value) for name, value in (facts | {"rows": tuple(rows)}).items()}
    return agreed_transport(group, Word({"direction": "forward"} | fields), "forward", x.device)


def _move(
    transport: Transport, rank: int, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]
) -> None:
    """Receive a dense tensor from each other rank, and send one to each; empty ones stay."""
    transport.prepare(incoming[rank].device)
    transport.at(Label("parts", 0, 0))
    receives, sends = (
        [P2P(x.view(-1), peer) for peer, x in enumerate(side) if peer != rank and x.numel()]
        for side in (incoming, outgoing)
    )
    for work in transport.start(receives, sends):
        work.wait()


@torch.library.register_fake(GATHER)
def _fake_gather(part: Tensor, rows: Sequence[int], rank: int, group_name: str) -> Tensor:
    return part.new_empty(sum(rows), part.shape[1])


@torch.library.register_fake(SUM)
def _fake_sum(whole: Tensor, rows: Sequence[int], rank: int, group_name: str) -> Tensor:
    return whole.new_empty(rows[rank], whole.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place = inputs[1:]


def _sum_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return sum_parts_op(grad, *ctx.place), None, None, None


def _gather_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return gather_parts_op(grad, *ctx.place), None, None, None


register_gradient(GATHER, _sum_gradient, _keep)
register_gradient(SUM, _gather_gradient, _keep)


@torch.library.register_fake(SUM_RANKS)
def _fake_sum_ranks(
    local: Tensor, group_name: str, is_back: bool = False, origin: int = 0
) -> Tensor:
    return local.new_empty(1, *local.shape).sum(0)


class _SumFunction(_SingleLevelFunction):
    """The autograd node of a sum over ranks.

    Backward gets zeros where autograd has no gradient, since DDP gives none to outputs that nobody
    used, and the other ranks wait for this one.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, keyset: Any, group_name: str, *place: Any) -> Tensor:
        inputs = local, group_name, *place
        total = below_autograd(sum_ranks_op, sum_ranks, keyset, *inputs, of_node=True)
        ctx.place = group_name, place, 0
        if is_plain_call(keyset):  # a compiler makes no call now, so that there is no number of it
            group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
            ctx.place = group_name, place, session_of(group).number
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        group_name, (is_back, origin), number = ctx.place
        total = sum_ranks_op(grads[0], group_name, not is_back, 0 if origin else number)
        return total, None, None, None, None


def _recorded_sum(
    keyset: Any, local: Tensor, group_name: str, is_back: bool = False, origin: int = 0
) -> Tensor:
    if forward_ad._current_level >= 0:
        refuse_tangents((local,))
    place = group_name, is_back, origin
    if torch.is_grad_enabled() and local.requires_grad:
        return recorded(_SumFunction, local, keyset, *place)
    return below_autograd(sum_ranks_op, sum_ranks, keyset, local, *place)


LIBRARY.impl("sum_ranks", _recorded_sum, "Autograd", with_keyset=True)
register_samples(SUM_RANKS)
