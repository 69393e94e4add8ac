"""What the ring asks of a block kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dtensor_ring.mask import Mask
from dtensor_ring.segments import Segments


@dataclass(frozen=True, slots=True)
class Problem:
    """What decides whether a kernel can serve a ring: the same value on every rank.

    `windowed` says that tiles may have other bands than full and causal ones, `grouped` that there
    are fewer heads of keys than of queries, `packed` that there are documents, of which a step may
    have any number.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    scale: float = 1.0
    softcap: float = 0.0
    differentiable_lse: bool = False
    windowed: bool = False
    grouped: bool = False
    packed: bool = False


class Kernel(ABC):
    """Attention of one tile: a rectangle of queries and keys with a band.

    The kernels' side of the contract: `query` is `(B, N, R, H)`, `key` `(B, Nkv, C, H)` and
    `value` `(B, Nkv, C, Hv)` with any strides whose last is 1, `N` a multiple of `Nkv`, `B`, `R`
    and `C` at least 1. `mask` is in tile indices, row i sees column j iff `i - left <= j <= i +
    right`; every row sees something, and a causal tile is square.
    """

    name: ClassVar[str]
    has_segments: ClassVar[bool] = False
    """Whether the two methods at the end are there: one launch for many tiles."""

    @abstractmethod
    def missing(self) -> str | None:
        """Why this kernel cannot run on this machine, `None` if it can."""

    @abstractmethod
    def supports(self, problem: Problem) -> str | None:
        """Why this kernel cannot serve the problem, `None` if it can."""

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        """`out` `(B, N, R, Hv)` in the query's dtype, and its `lse` `(B, N, R)`, float32 or wider.

        Both are fresh tensors, which the caller may write to.
        """

    @abstractmethod
    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None,
        mask: Mask,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This tile's share of the gradients of query, key and value, as fresh tensors.

        `out` and `lse` are those of the whole row, over all tiles; `grad_lse` is given only to
        kernels that support `differentiable_lse`.
        """

    def forward_segments(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        """`forward` of many tiles: `query` is `(T, N, H)`, `key` `(U, Nkv, H)`, `value` likewise.

        `out` is `(T, N, Hv)` and `lse` `(N, T)`; a row without keys is (0, -inf).
        """
        raise NotImplementedError(f"{self.name} has no segments")

    def backward_segments(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` of many tiles; a row without keys, and a key without rows, gets 0.

        `lse` is `(N, T)`, and -inf only of rows without keys.
        """
        raise NotImplementedError(f"{self.name} has no segments")
