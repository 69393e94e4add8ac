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
        hosts: all copies to the host.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.hosts: list[Tensor] = []

    def takes(self, x: Tensor) -> bool:
        return type(x) is Tensor

    def to_host(self, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        memory = torch.from_numpy(np.empty(x.nbytes, np.uint8)).view(x.dtype)
        host = memory.as_strided(x.shape, x.stride()).copy_(x)
        self.hosts.append(host)
        return host, self._noted("out", len(self.hosts) - 1)

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, Callable[[], None]]:
        number = next(index for index, x in enumerate(self.hosts) if x is host)
        return torch.empty_like(host).copy_(host), self._noted("in", number)

    def _noted(self, what: str, number: int) -> Callable[[], None]:
        self.log.append((what, number))
        return partial(self.log.append, (f"wait {what}", number))
