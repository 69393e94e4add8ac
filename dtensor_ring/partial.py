"""The partial result of the local queries, tile by tile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dtensor_ring.filled import Filled
from dtensor_ring.merge import merge_
from dtensor_ring.order import empty, in_order, order_of
from dtensor_ring.region import Region, region, rows_of
from dtensor_ring.tile import Tile


class Partial:
    """The running (out, lse) of the local queries.

    Note [Where outputs are rounded]: what is merged more than once is float32 or wider. What the
    first tile gives is kept in the dtype of the query if it covers all rows; and what the last one
    gives is merged into memory of that dtype at once. So every output is rounded once on its way,
    beside what kernels round themselves. Sinks come in last, so with them all is wide until then.

    Args:
        query: the local queries `(B, N, L, H)`.
        value_head_dim: of the outputs.
        sinks: `(N,)`, one more block of scores, which has no value.
    """

    def __init__(self, query: Tensor, value_head_dim: int, sinks: Tensor | None = None) -> None:
        self._query, self._sinks = query, sinks
        self._shape = (*query.shape[:3], value_head_dim)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._filled = Filled(self._shape)
        self._target: Tensor | None = None  # for rows that are finished
        self._finished: list[Tile] = []

    def add(self, tile: Tile, out: Tensor, lse: Tensor, is_last: bool = False) -> None:
        """Merge what a kernel returned for the tile; the last one for all its rows, or not."""
        if self._out is None and out.shape == self._shape:
            self._out, self._lse = out, lse
            self._filled = Filled(self._shape, is_full=True)
            return
        is_last = is_last and self._sinks is None
        total, total_lse = self._accumulators(lse, is_last)
        target = self._finish(tile) if is_last else total
        at = rows_of(tile)
        if self._filled.reach(total, at):
            target[at].copy_(out)
            total_lse[at].copy_(lse)
        else:
            merge_(total[at], total_lse[at], out, lse, None if target is total else target[at])

    def result(self) -> tuple[Tensor, Tensor]:
        """`out` `(B, N, L, Hv)`, in the query's dtype and order, and `lse` `(B, N, L)`."""
        out, lse = self._out, self._lse
        if out is None or lse is None or self._sinks is not None:
            wide = torch.promote_types(self._query.dtype, torch.float32)
            like = self._query.new_empty(self._shape[:3], dtype=wide) if lse is None else lse
            out, lse = self._accumulators(like)
        self._filled.finish(out)
        if self._sinks is not None:
            lse = _add_sinks(out, lse, self._sinks)
        if self._target is not None:
            for at in self._unfinished():
                self._target[at].copy_(out[at])
            out = self._target
        return in_order(out, order_of(self._query), self._query.dtype), lse.contiguous()

    def _accumulators(self, like: Tensor, is_last: bool = False) -> tuple[Tensor, Tensor]:
        """The sums so far, as wide as that lse; what comes last may go to narrow ones."""
        if self._out is None or self._lse is None:
            dtype = self._query.dtype if is_last else like.dtype
            self._out = empty(self._query, self._shape, order_of(self._query), dtype)
            order = order_of(like.unsqueeze(-1))[:-1]  # all lse in one, else merging is slow
            self._lse = empty(like, self._shape[:3], order).fill_(-torch.inf)
        if not is_last:
            self._out = self._out.to(like.dtype)
        return self._out, self._lse

    def _finish(self, tile: Tile) -> Tensor:
        """Where the rows of the tile get their final values."""
        assert self._out is not None
        if self._out.dtype == self._query.dtype:
            return self._out
        if self._target is None:
            self._target = empty(self._query, self._shape, order_of(self._query))
        self._finished.append(tile)
        return self._target

    def _unfinished(self) -> Iterator[Region]:
        """Regions of which the target knows nothing yet."""
        by_row = any(tile.batch is not None for tile in self._finished)
        for batch in range(self._shape[0]) if by_row else [None]:
            here = [tile.rows for tile in self._finished if tile.batch in (None, batch)]
            start = 0
            for rows in [*sorted(here), (self._shape[2], self._shape[2])]:
                if start < rows[0]:
                    yield region(batch, (start, rows[0]))
                start = max(start, rows[1])


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale `out` in place; the new lse, in which a row that sees nothing has that of its sink."""
    sink_lse = sinks.to(lse.dtype).view(1, -1, 1)
    weight = (lse - sink_lse).sigmoid_().masked_fill_(lse == -torch.inf, 0.0)
    out.mul_(weight.unsqueeze(-1))
    return torch.logaddexp(lse, sink_lse)
