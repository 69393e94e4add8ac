"""The contract of a transport: what moves the messages between the ranks of a ring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dtensor_ring.transport.buffers import BUFFERS


class P2P(NamedTuple):
    """A flat tensor that goes to a peer, or comes from it; peers count along the axis."""

    flat: Tensor
    peer: int


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
