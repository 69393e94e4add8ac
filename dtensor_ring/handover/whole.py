"""Tensors that all ranks of one side have alike, such as states and windows, for the other side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.dtensor.call_check import check_agreement
from dtensor_ring.handover.call import device_of, handing_over
from dtensor_ring.handover.run import Content, Incoming, Outgoing


class _Told(NamedTuple):
    contents: tuple[Content, ...] | None
    gets: bool


SAME_TENSORS = "hand over the same tensors"


def copy_whole(
    tensors: Sequence[Tensor] | None, gets: bool, mesh: DeviceMesh
) -> list[Tensor] | None:
    """Give tensors that some ranks have alike to other ranks.

    Each rank that lacks them gets them from one rank; those that give take turns.

    Args:
        tensors: the tensors on the ranks that have them; `None` on others.
        gets: whether this rank asks for them.
        mesh: a 1-D mesh of all ranks, which must all call it.

    Returns:
        Copies of them if this rank asked, else `None`.

    Raises:
        ValueError: on every rank, if ranks have other tensors, or nobody has any.
        RingError: on every rank, if a rank ended, raised, or did not answer in time.

    >>> copy_whole([torch.ones(2)], True, init_device_mesh("cpu", (1,)))
    [tensor([1., 1.])]
    """
    group = axis_group(mesh)
    device = device_of(mesh)
    mine = None if tensors is None else tuple([Content.of(x) for x in tensors])
    told = check_agreement(group, {}, SAME_TENSORS, _Told(mine, gets))
    contents = _same(told, dist.get_process_group_ranks(group))
    givers = [rank for rank, x in enumerate(told) if x.contents is not None]
    takers = [rank for rank, x in enumerate(told) if x.gets and x.contents is None]
    # Receivers are assigned to senders in turn, so that all senders send about as much.
    pairs = [(givers[i % len(givers)], rank) for i, rank in enumerate(takers)]
    made = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in contents]
    rank = group.rank()

    def put(packed: list[Tensor]) -> None:
        for into, x in zip(made, packed, strict=True):
            into.copy_(x)

    def fill(packed: list[Tensor]) -> None:
        for into, x in zip(packed, tensors or (), strict=True):
            into.copy_(x)

    with handing_over(group, {"whole tensors": [*contents]}, device) as posts:
        incoming = [Incoming(giver, contents, put) for giver, taker in pairs if taker == rank]
        outgoing = [Outgoing(taker, contents, fill) for giver, taker in pairs if giver == rank]
        posts.post(0, incoming, outgoing)
    if not gets:
        return None
    # Copies also where they were: what one side writes later must not show on the other.
    return made if tensors is None else [x.clone() for x in tensors]


def _same(told: Sequence[_Told], ranks: Sequence[int]) -> tuple[Content, ...]:
    """Return the shapes and dtypes that all ranks with tensors have.

    Raises:
        ValueError: if they differ, or nobody has any.
    """
    found = {
        rank: x.contents for rank, x in zip(ranks, told, strict=True) if x.contents is not None
    }
    if len(set(found.values())) != 1:
        raise ValueError(f"ranks that give must have tensors of equal shapes, they have {found}")
    (contents,) = set(found.values())
    return contents
