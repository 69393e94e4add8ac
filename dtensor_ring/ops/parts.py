"""A tensor of which each rank has made some rows: gathered on all, and summed back to them.

The ops are each other's backward. Parts may differ in rows, and a rank may have none. Each part
goes straight to the ranks that want it, one message to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.compute.trace import Label
from dtensor_ring.ops.transforms import register_gradient
from dtensor_ring.transport.agreed import TransportContext, agreed_transport
from dtensor_ring.transport.process_group import transport_of
from dtensor_ring.transport.protocol import P2P, Transport
from dtensor_ring.transport.word import Word

GATHER = "dtensor_ring::gather_parts"
SUM = "dtensor_ring::sum_parts"

torch.library.define(GATHER, "(Tensor part, int[] rows, int rank, str group_name) -> Tensor")
torch.library.define(SUM, "(Tensor whole, int[] rows, int rank, str group_name) -> Tensor")
gather_parts_op = torch.ops.dtensor_ring.gather_parts.default
sum_parts_op = torch.ops.dtensor_ring.sum_parts.default


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
