"""The partial result of the local queries, launch by launch."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from dtensor_ring.compute.memory import (
    Region,
    WriteTracker,
    empty,
    in_order,
    order_of,
    part_of,
    region,
)
from dtensor_ring.compute.merge import is_bounded, merge_
from dtensor_ring.compute.sinks import add_sinks


class Partial:
    """The running (out, lse) of the local queries.

    Note [Where outputs are rounded]: rows that are merged more than once are float32 or wider. If
    the first launch covers all rows, its result is kept in the query's dtype. The result of the
    last launch of some rows is merged straight into memory of that dtype. So merging rounds every
    output once, in addition to what kernels round themselves. Sinks enter after the last merge, so
    with sinks everything is wide until then.

    Args:
        query: the local queries `(B, N, L, H)`.
        value_head_dim: head dim of the outputs.
        sinks: one logit for each head `(N,)`; see `dtensor_ring.compute.sinks`.
        dtype: of the result; by default the query's.
    """

    def __init__(
        self,
        query: Tensor,
        value_head_dim: int,
        sinks: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._query, self._sinks, self._dtype = query, sinks, dtype or query.dtype
        self._shape = (*query.shape[:3], value_head_dim)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._filled = WriteTracker(self._shape)
        self._target: Tensor | None = None  # for rows that are finished
        self._finished: list[Region] = []
        self._is_bounded = True

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added yet."""
        return self._out is None

    def expect(self, values: Tensor) -> None:
        """Look at the values that the next outputs come from: extreme ones are merged with care."""
        # A look at many values, as in a cache, takes longer than to merge few rows with care.
        is_cheap = values.numel() <= prod(self._shape)
        self._is_bounded = self._is_bounded and is_cheap and is_bounded(values)

    def add(self, at: Region, out: Tensor, lse: Tensor, is_last: bool = False) -> None:
        """Merge what a kernel returned for a region of `(B, N, L)`.

        Args:
            at: the region.
            out: `(B, N, R, Hv)`, which may be kept or written to.
            lse: `(B, N, R)`, likewise.
            is_last: whether nothing else comes for any of these rows.
        """
        if self._out is None and out.shape == self._shape:
            # Often the first launch covers all rows: its memory becomes the accumulator.
            self._out, self._lse = out, lse
            self._filled.fill()
            return
        is_last = is_last and self._sinks is None  # sinks still scale every row
        total, total_lse = self._accumulators(lse, is_last)
        # Final rows are rounded once, on their way into the output.
        target = self._finish(at) if is_last else total
        # New rows have nothing to merge with.
        if self._filled.reach(total, at):
            part_of(target, at).copy_(out)
            part_of(total_lse, at).copy_(lse)
        else:
            merged = None if target is total else part_of(target, at)
            part, part_lse = part_of(total, at), part_of(total_lse, at)
            merge_(part, part_lse, out, lse, merged, self._is_bounded)

    def result(self) -> tuple[Tensor, Tensor]:
        """`out` `(B, N, L, Hv)`, in its dtype and the query's order, and `lse` `(B, N, L)`."""
        out, lse = self._out, self._lse
        if out is None or lse is None or self._sinks is not None:
            # Nothing was seen, or sinks scale what may still be narrow.
            wide = torch.promote_types(self._query.dtype, torch.float32)
            like = self._query.new_empty(self._shape[:3], dtype=wide) if lse is None else lse
            out, lse = self._accumulators(like)
        # Rows that no launch had stay (0, -inf).
        self._filled.finish(out)
        if self._sinks is not None:
            lse = add_sinks(out, lse, self._sinks)
        if self._target is not None:
            # Finished rows are in the target already; the others are rounded here.
            for at in self._unfinished():
                self._target[at].copy_(out[at])
            out = self._target
        return in_order(out, order_of(self._query), self._dtype), lse.contiguous()

    def _accumulators(self, like: Tensor, is_last: bool = False) -> tuple[Tensor, Tensor]:
        """The out and lse so far: as wide as that lse, or not widened for the last of its rows."""
        if self._out is None or self._lse is None:
            dtype = self._dtype if is_last else like.dtype
            self._out = empty(self._query, self._shape, order_of(self._query), dtype)
            # Every lse in the kernel's order: merging two orders reads memory across its rows.
            order = order_of(like.unsqueeze(-1))[:-1]
            self._lse = empty(like, self._shape[:3], order).fill_(-torch.inf)
        if not is_last and self._out.dtype != like.dtype:
            # More is merged later: from here on these rows must not be rounded.
            self._out = self._out.to(like.dtype)
        return self._out, self._lse

    def _finish(self, at: Region) -> Tensor:
        """Where the rows of the region get their final values."""
        assert self._out is not None
        if self._out.dtype == self._dtype:
            # The accumulator is narrow or inputs are wide: it is the output already.
            return self._out
        if self._target is None:
            self._target = empty(self._query, self._shape, order_of(self._query), self._dtype)
        self._finished.append(at)
        return self._target

    def _unfinished(self) -> Iterator[Region]:
        """Regions that the target does not have yet."""
        # Regions of all batch rows leave the same gaps in each.
        by_row = any(batches.start is not None for batches, _, _ in self._finished)
        for batch in range(self._shape[0]) if by_row else [None]:
            here = [x for batches, _, x in self._finished if batches.start in (None, batch)]
            spans = sorted((rows.start, rows.stop) for rows in here)
            start = 0
            # Sorted, so what lies between two finished spans is a gap; the end closes the last.
            for rows in [*spans, (self._shape[2], self._shape[2])]:
                if start < rows[0]:
                    yield region(batch, (start, rows[0]))
                start = max(start, rows[1])
