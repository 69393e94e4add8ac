"""The contract of a transport: what moves the messages between the ranks of a ring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dtensor_ring.compute.trace import Label
from dtensor_ring.transport.buffers import BUFFERS


class P2P(NamedTuple):
    """A flat tensor that goes to a peer, or comes from it; peers count along the axis.

    `source` is the rank on the axis whose shard it has columns of, and `tag` a number that both
    sides of a message have, and messages of other calls have not.
    """

    flat: Tensor
    peer: int
    tag: int = 0
    source: int | None = None


class Chain(NamedTuple):
    """Messages that go along the ranks and not around them, between two calls of one order."""

    step: int
    """1 to the next rank, -1 to the one before; the last and the first have no neighbour there."""
    tag: int
    """Of the messages: what one call sends, another one receives."""


class Work(Protocol):
    """A message in flight."""

    def wait(self) -> object:
        """Return once the next kernels may read or overwrite the message's tensor."""


class Transport(ABC):
    """Allocates the buffers of messages, and starts the messages of a hop.

    A subclass has to provide `start` only. One that wants registered memory (NCCL user buffers,
    symmetric memory) overrides `allocate` and `free`, too. Pass it as `SequenceAxis(transport=)`.

    >>> class Alone(Transport):
    ...     def start(self, receives, sends):
    ...         return []  # a ring of one rank has no messages
    >>> Alone().start([], [])
    []
    """

    def keeps_tags(self, device: torch.device) -> bool:
        """Whether messages of that device with other tags never meet; else ranks agree first."""
        return False

    def at(self, label: Label) -> None:  # noqa: B027 - most need not know
        """Every step of a loop begins with it, and goes on with it after each start of messages.

        Ranks that have been asked as often have started the same messages.
        """

    def abort(self) -> None:  # noqa: B027 - most are closed with the group
        """Let nobody wait for this rank any more: after an error, no call follows."""

    def prepare(self, device: torch.device) -> None:  # noqa: B027 - most have nothing to prepare
        """Get ready for tensors of that device; every rank calls it before a loop's first hop.

        Raises:
            ValueError: if this transport cannot move tensors of that device.
        """

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """A uint8 buffer of at least `num_bytes` bytes, with any content."""
        return BUFFERS.take(num_bytes, device)

    def free(self, buffer: Tensor) -> None:
        """Take back a buffer of `allocate` that no message and no kernel uses any more.

        It is not called for messages that an error left in flight.
        """
        BUFFERS.give(buffer)

    @abstractmethod
    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        """Start the messages of a hop; between two ranks they match in the order given here.

        Each `Work` keeps the tensor of its message alive until the message is complete.
        """
