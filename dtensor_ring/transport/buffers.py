"""Memory for messages, which on a CPU serves one call after another."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

MAX_SPARES = 5
"""Buffers of a backward pass: around the ring, two for shards, two for sums of gradients, and one
for a sum that returns to its owner; on the direct route, three for shards and two for sums."""


class BufferPool:
    """Keeps the last few buffers that were given back.

    Fresh memory costs a page fault every 4 KiB, which on a CPU is more than all else that a ring
    adds to its kernels. The allocators of other devices do this themselves. At most `MAX_SPARES`
    buffers are kept, each of the size of a key and value shard, or of their gradients.
    """

    def __init__(self) -> None:
        self._spares: list[Tensor] = []
        self._lock = Lock()  # backward may run in a thread of its own

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """At least that many bytes, of any content."""
        with self._lock:
            fitting = [i for i, x in enumerate(self._spares) if x.numel() >= num_bytes]
            if device.type == "cpu" and fitting:
                # The smallest that fits: larger ones stay for larger messages.
                return self._spares.pop(min(fitting, key=lambda i: self._spares[i].numel()))
        with torch.inference_mode(False):  # else it could not be written to outside of that mode
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back, once nothing reads or writes it."""
        if buffer.device.type == "cpu":
            with self._lock:
                self._spares.append(buffer)
                # The oldest go first: calls of another size may be over.
                del self._spares[:-MAX_SPARES]


BUFFERS = BufferPool()
