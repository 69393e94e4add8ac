"""A stand-in for copies between a device and the host: all is done at once, and noted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor


class PlayedCopies:
    """Takes a CPU for a device. Host memory is that of numpy, which no counter of tensors sees.

    Attributes:
        log: ("out" or "in" of a copy, or what waits for it, and the number of the tensor).
        num_bytes: of all copies to the host.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.num_bytes = 0
        self._numbers: dict[int, int] = {}

    def takes(self, x: Tensor) -> bool:
        return type(x) is Tensor

    def to_host(self, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        memory = np.empty(x.nbytes, np.uint8)
        host = torch.from_numpy(memory).view(x.dtype).view(x.shape)
        host.copy_(x)
        self.num_bytes += x.nbytes
        number = self._numbers.setdefault(host.data_ptr(), len(self._numbers))
        return host, self._noted("out", number)

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, Callable[[], None]]:
        return torch.empty_like(host).copy_(host), self._noted("in", self._numbers[host.data_ptr()])

    def _noted(self, what: str, number: int) -> Callable[[], None]:
        self.log.append((what, number))
        return partial(self.log.append, (f"wait {what}", number))
