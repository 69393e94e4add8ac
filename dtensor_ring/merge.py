"""Partial results of the local queries, and of gradients, summed up tile by tile.

A partial attention result is (out, lse). Two of them over disjoint keys merge exactly (Milakov
and Gimelshein, 2018, arXiv 1805.02867); (0, -inf) is the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.order import TOKEN_MAJOR, in_order, order_of, zeros
from dtensor_ring.tile import Span, Tile

Region = tuple[slice, slice, slice]
"""An index of batch, heads and tokens."""
WHOLE: Region = (slice(None), slice(None), slice(None))


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block into `out` `(..., L, H)` and `lse` `(..., L)`, in place.

    A row that neither side has seen stays (0, -inf).
    """
    weight = (block_lse - lse).sigmoid_().masked_fill_(block_lse == -torch.inf, 0.0)
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


class Partial:
    """The running (out, lse) of the local queries, float32 or wider once two tiles met."""

    def __init__(self, query: Tensor, value_head_dim: int) -> None:
        self._query = query
        self._shape = (*query.shape[:3], value_head_dim)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._ends = [0] * query.shape[0]  # of the rows that tiles have covered, by batch row

    def add(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """Merge what a kernel returned for the tile."""
        first = self._is_first(tile)
        if self._out is None and out.shape == self._shape:
            self._out, self._lse = out, lse.contiguous()
            return
        total, total_lse = (_region(x, tile) for x in self._accumulators(lse.dtype))
        if first:
            total.copy_(out)
            total_lse.copy_(lse)
        else:
            merge_(total, total_lse, out, lse)

    def result(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`out` `(B, N, L, Hv)`, in the query's dtype and order, and `lse` `(B, N, L)`.

        `sinks` `(N,)` are one more block of scores, which has no value.
        """
        wide = torch.promote_types(self._query.dtype, torch.float32)
        if self._out is None or sinks is not None:
            self._accumulators(wide)
        assert self._out is not None and self._lse is not None
        out, lse = self._out, self._lse
        if sinks is not None:
            sink_lse = sinks.to(lse.dtype).view(1, -1, 1)
            weight = (lse - sink_lse).sigmoid_().masked_fill_(lse == -torch.inf, 0.0)
            out.mul_(weight.unsqueeze(-1))
            lse = torch.logaddexp(lse, sink_lse)
        return in_order(out, order_of(self._query), self._query.dtype), lse

    def _is_first(self, tile: Tile) -> bool:
        """Whether nothing was added to the rows of the tile, which are covered from now on.

        The tiles of a step come in the order of their rows, so it is enough to know the last one.
        """
        batch = _batch(tile)
        ends = self._ends[batch]
        self._ends[batch] = [max(end, tile.rows[1]) for end in ends]
        return max(ends, default=0) <= tile.rows[0]

    def _accumulators(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            self._out = zeros(self._query, self._shape, order_of(self._query), dtype)
            self._lse = self._query.new_full(self._shape[:3], -torch.inf, dtype=dtype)
        self._out = self._out.to(dtype)
        return self._out, self._lse


class GradientSum:
    """The sum of the tiles' gradients of one tensor `(B, N, L, H)`.

    A single tile that covers everything is kept as it is; a sum of more is float32 or wider.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, region: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, L)`."""
        if self._total is None and grad.shape == self._like.shape:
            self._total = grad
            return
        self.total()[region].add_(grad)

    def total(self) -> Tensor:
        """The sum so far, to be written to."""
        wide = torch.promote_types(self._like.dtype, torch.float32)
        if self._total is None:
            self._total = zeros(self._like, self._like.shape, TOKEN_MAJOR, wide)
        self._total = self._total.to(wide)
        return self._total

    def add_home(self, home: Tensor, cols: Span) -> None:
        """Add what the other ranks summed up for these columns; rounds once, at the end."""
        own = (self.total() if self._total is None else self._total)[:, :, slice(*cols)]
        torch.add(own, home, out=own)

    def result(self) -> Tensor:
        """The sum in the tensor's dtype, token-major."""
        total = self.total() if self._total is None else self._total
        return in_order(total, TOKEN_MAJOR, self._like.dtype)


class GradientShare:
    """A step's share of the gradient of a shard that is passing, until the sum arrives.

    The tiles' gradients are kept as they are, unless they outgrow the shard `(B, N, C, H)`.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._grads: list[tuple[Region, Tensor]] = []

    def add(self, region: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, C)`."""
        self._grads.append((region, grad))
        if sum(x.numel() for _, x in self._grads) > self._like.numel():
            total = GradientSum(self._like)
            for kept in self._grads:
                total.add(*kept)
            self._grads = [(WHOLE, total.total())]

    def add_to(self, total: Tensor, first: bool) -> None:
        """Add to the sum, or begin it: then `total` holds nothing yet."""
        if first and [grad.shape for _, grad in self._grads] == [total.shape]:
            total.copy_(self._grads[0][1])
            return
        if first:
            total.zero_()
        for region, grad in self._grads:
            total[region].add_(grad)


def _region(x: Tensor, tile: Tile) -> Tensor:
    """The part of `(B, N, L, ...)` that a tile's rows cover."""
    return x[rows_of(tile)]


def rows_of(tile: Tile) -> Region:
    """Index of a tile's queries in `(B, N, L)`."""
    return _batch(tile), slice(None), slice(*tile.rows)


def cols_of(tile: Tile) -> Region:
    """Index of a tile's keys in `(B, N, C)`."""
    return _batch(tile), slice(None), slice(*tile.cols)


def _batch(tile: Tile) -> slice:
    return slice(None) if tile.batch is None else slice(tile.batch, tile.batch + 1)
