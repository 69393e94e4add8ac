"""What carries messages between the ranks of a ring: a process group, or a stand-in for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """A flat tensor that goes to a rank of the ring, or comes from it."""

    flat: Tensor
    peer: int


class Work(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Until what is computed next may read or write its tensor."""


class Wire(Protocol):
    """What carries the messages between the ranks of a ring."""

    def prepare(self, device: torch.device) -> None:
        """Called on every rank before the first message of a ring."""

    def start(self, receives: list[Message], sends: list[Message]) -> Sequence[Work]:
        """Start the messages of a hop, which are in the order in which the peers post them."""
        ...


class GroupWire:
    """Messages between the processes of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def prepare(self, device: torch.device) -> None:
        """NCCL wants all ranks of a group in its first call, and a hop may concern only a few.

        Raises:
            ValueError: if it is gloo that would move tensors of a GPU.
        """
        if device.type == "cuda" and self._group._get_backend(device).name() == "gloo":
            raise ValueError(
                "the tensors are on CUDA and their group is gloo's, which sends those of CPUs "
                'only; init_process_group("nccl"), or "cpu:gloo,cuda:nccl"'
            )
        if device.type == "cuda" and self._group not in _READY:
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            _READY.add(self._group)

    def start(self, receives: list[Message], sends: list[Message]) -> Sequence[Work]:
        """Receives go first.

        Of two ranks that both begin by sending, gloo lets only one send at a time, and the hop
        takes twice as long.
        """
        operations = [self._operation(dist.irecv, message) for message in receives]
        operations += [self._operation(dist.isend, message) for message in sends]
        return dist.batch_isend_irecv(operations) if operations else []

    def _operation(self, what: Callable[..., dist.Work | None], message: Message) -> dist.P2POp:
        return dist.P2POp(what, message.flat, group=self._group, group_peer=message.peer)


_READY: WeakSet[dist.ProcessGroup] = WeakSet()
