"""Counts what a process group's transport sends and receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dtensor_ring.lab.recorded import Cost, Recorder
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport


def counted(run: Callable[[], Any]) -> tuple[Any, Cost]:
    """What a call returns, its messages, and the most bytes of buffers at once."""
    noted, real = Recorder(), ProcessGroupTransport
    start, allocate, free = real.start, real.allocate, real.free

    def starting(this: Any, receives: list[P2P], sends: list[P2P]) -> Any:
        noted.start(receives, sends)
        return start(this, receives, sends)

    def allocating(this: Any, num_bytes: int, device: torch.device) -> Tensor:
        noted.allocate(num_bytes, device)
        return allocate(this, num_bytes, device)

    def freeing(this: Any, buffer: Tensor) -> None:
        noted.free(buffer)
        free(this, buffer)

    with patch.multiple(real, start=starting, allocate=allocating, free=freeing):
        result = run()
    return result, noted.cost
