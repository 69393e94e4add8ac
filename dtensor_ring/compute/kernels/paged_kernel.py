"""The contract of a kernel that reads keys and values through block tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import Problem, Result, Scores
from dtensor_ring.compute.memory import Numbers


@dataclass(frozen=True, eq=False)
class Pages:
    """The blocks that each entry of a launch reads.

    Attributes:
        tables: indices of blocks `(E, P)`, int32. P is the number of blocks of the longest entry;
            shorter rows are padded with block 0.
        lengths: number of keys of each entry `(E,)`, int32, at least 1.
        block: number of keys of a block.
    """

    tables: np.ndarray
    lengths: np.ndarray
    block: int

    @cached_property
    def longest(self) -> int:
        """Number of keys of the longest entry."""
        return int(self.lengths.max())

    @cached_property
    def num_keys(self) -> int:
        """Number of keys of all entries."""
        return int(self.lengths.sum())

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `tables` and `lengths` on a device, where they are copied once."""
        tables, lengths = self._numbers.on(device)
        return tables, lengths

    @cached_property
    def _numbers(self) -> Numbers:
        return Numbers(torch.int32, torch.from_numpy(self.tables), torch.from_numpy(self.lengths))


class PagedKernel(ABC):
    """Attention of a few queries to keys in blocks, forward only.

    Letters: E entries, R queries of each, N query heads, Nkv key heads, H head dim, Hv head dim of
    values. There is no mask: every query of an entry sees every key of that entry.

    Attributes:
        name: the name that users pass.
        whole_blocks: whether it reads whole blocks only: lengths are then multiples of a block.
    """

    name: ClassVar[str]
    whole_blocks: ClassVar[bool] = False

    @abstractmethod
    def missing(self) -> str | None:
        """Return why this kernel cannot run on this machine's current device, or `None`."""

    @abstractmethod
    def supports(self, problem: Problem, block: int) -> str | None:
        """Return why this kernel cannot serve a problem with this block size, or `None`."""

    @abstractmethod
    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        """Return `(out, lse)` of each entry.

        Args:
            query: `(E, R, N, H)`, token-major, of any strides whose last is 1.
            key_blocks: `(num_blocks, block, Nkv, H)`, contiguous.
            value_blocks: `(num_blocks, block, Nkv, Hv)`, contiguous.
            pages: the blocks that each entry reads.
            scores: scale and softcap.

        Returns:
            Fresh tensors: `out` `(E, R, N, Hv)` in the query's dtype, and `lse` `(E, N, R)`, the
            natural log-sum-exp, float32 or wider.
        """


def whole_pages(block: int, multiple: int) -> str | None:
    """Return why a kernel that needs blocks of a multiple of keys refuses a size, or `None`."""
    if block % multiple == 0:
        return None
    return (
        f"it reads blocks of a multiple of {multiple} keys, got {block}; make the pool with "
        f"block={-(-block // multiple) * multiple}"
    )
