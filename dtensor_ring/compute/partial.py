"""The partial result of the local queries, launch by launch."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.compute.memory import WHOLE, Region, empty, order_of
from dtensor_ring.compute.parts import Parts


class Partial:
    """The running (out, lse) of the local queries: the parts that launches gave, see `Parts`.

    Sinks enter with the last merge.

    Args:
        query: the local queries `(B, N, L, H)`.
        value_head_dim: head dim of the outputs.
        sinks: one logit for each head `(N,)`; see `dtensor_ring.compute.sinks`.
        dtype: of the result; by default the query's.
        room: how many parts may be kept, see `Parts`.
    """

    def __init__(
        self,
        query: Tensor,
        value_head_dim: int,
        sinks: Tensor | None = None,
        dtype: torch.dtype | None = None,
        room: int | None = None,
    ) -> None:
        self._query, self._sinks, self._dtype = query, sinks, dtype or query.dtype
        self._shape = torch.Size((*query.shape[:3], value_head_dim))
        self._parts = Parts(self._shape, self._dtype, order_of(query), room)

    def make_room(self) -> None:
        """Merge what is here if another part would be one too many."""
        self._parts.make_room()

    def add(self, at: Region, out: Tensor, lse: Tensor) -> None:
        """Add what a kernel returned for a region of `(B, N, L)`.

        Args:
            at: the region.
            out: `(B, N, R, Hv)`, which is kept and may be written to.
            lse: `(B, N, R)`, likewise.
        """
        self._parts.add(at, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """`out` `(B, N, L, Hv)`, in its dtype and the query's order, and `lse` `(B, N, L)`."""
        if not self._parts:
            self._add_nothing()
        out, lse = self._parts.result(self._sinks)
        assert lse is not None, "all parts of a partial result have one"
        return out, lse.contiguous()

    def _add_nothing(self) -> None:
        """A part of no keys."""
        wide = torch.promote_types(self._dtype, torch.float32)
        out = empty(self._query, self._shape, order_of(self._query), self._dtype).zero_()
        lse = self._query.new_full(self._shape[:3], -torch.inf, dtype=wide)
        self._parts.add(WHOLE, out, lse)
