"""What is kept of keys or values, block by block, as the definition says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dtensor_ring.quantised import kept_tokens
from dtensor_ring.quantised.block_scales import FORMATS, dequantise
from dtensor_ring.quantised.kept_tokens import KINDS


class Rounded:
    """Tokens, one block after the other; a block is rounded when it is full."""

    def __init__(self, like: Tensor, name: str | None, kind: str) -> None:
        self._name, self._kind = name, kind
        self._closed: list[Tensor] = []
        self._open = like[:, :, :0]

    def append(self, x: Tensor) -> None:
        size = kept_tokens.BLOCK_SIZE
        if self._name is None:
            size = self._open.shape[2] + x.shape[2] + 1
        while x.shape[2]:
            room = size - self._open.shape[2]
            self._open, x = torch.cat([self._open, x[:, :, :room]], 2), x[:, :, room:]
            if self._name is not None and self._open.shape[2] == size:
                block = KINDS[self._kind](self._open, FORMATS[self._name], size)
                self._closed.append(dequantise(block, x.dtype))
                self._open = x[:, :, :0]

    def crop(self, num_tokens: int) -> None:
        while self._closed and num_tokens < self.read().shape[2] - self._open.shape[2]:
            self._open = self._closed.pop()
        before = sum(x.shape[2] for x in self._closed)
        self._open = self._open[:, :, : num_tokens - before]

    def rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self._closed, self._open = [change(x) for x in self._closed], change(self._open)

    def read(self) -> Tensor:
        return torch.cat([*self._closed, self._open], 2)
