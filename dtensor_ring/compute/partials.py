"""Defines a part of a tensor, and the sum or mean of several partials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_ring.compute.memory import WHOLE, Region, part_of, region
from dtensor_ring.planning.ranges import Span


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A partial result for a region of `(B, N, L)`.

    Attributes:
        region: the region.
        x: gradients or outputs `(B', N, R, H)`.
        lse: log-sum-exp `(B', N, R)` of outputs.
        denominator: `(B', N, R)`. `x` must still be divided by it, and its logarithm added to
            `lse`; see Note [Division at the end].
    """

    region: Region
    x: Tensor
    lse: Tensor | None = None
    denominator: Tensor | None = None

    def spans(self, shape: Sequence[int]) -> tuple[Span, Span]:
        """Return the ranges of batch rows and of tokens in a tensor of this shape."""
        batches, _, tokens = self.region
        return batches.indices(shape[0])[:2], tokens.indices(shape[2])[:2]


@dataclass(frozen=True, slots=True, eq=False)
class Accumulation:
    """A target, and the partials whose sum or mean is written to it.

    Without `lse`, the partials are added. With `lse`, they are outputs over disjoint keys and merge
    to a mean: `lse' = log(sum(exp(lse)))` and `x' = sum(x * exp(lse - lse'))` (Milakov and
    Gimelshein, 2018, arXiv 1805.02867). A row without partials becomes 0, with an lse of -inf.
    Arithmetic is float32 or wider, and rounds once.

    Attributes:
        target: `(B, N, L, H)`, overwritten; it may be the memory of the first partial.
        partials: partial results whose last stride is 1.
        lse: `(B, N, L)`, overwritten; it is that of the first partial if `target` is.
        sinks: one logit for each head `(N,)`, a score with a value of 0.
        denominator: `(B, N, L)`, on CPUs only: that of the first partial if `target` is its memory,
            else ones. It is updated; `target` is not divided by it yet.
    """

    target: Tensor
    partials: Sequence[Partial]
    lse: Tensor | None = None
    sinks: Tensor | None = None
    denominator: Tensor | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether the first partial is the target."""
        return bool(self.partials) and self.partials[0].x is self.target

    def cropped(self) -> Accumulation:
        """Return this sum without leading and trailing rows that no partial changes."""
        if not self.is_in_place or self._divides or self.sinks is not None:
            return self
        spans = [partial.spans(self.target.shape)[1] for partial in self.partials[1:]]
        rows = min((x[0] for x in spans), default=0), max((x[1] for x in spans), default=0)
        if rows == (0, self.target.shape[2]):
            return self
        where = region(None, rows)
        mine = self.target, self.lse, self.denominator
        target, lse, denominator = (None if x is None else part_of(x, where) for x in mine)
        assert target is not None
        partials = [Partial(WHOLE, target, lse, denominator)]
        partials += [
            Partial(
                (partial.region[0], partial.region[1], slice(first - rows[0], end - rows[0])),
                partial.x,
                partial.lse,
            )
            for partial, (first, end) in zip(self.partials[1:], spans, strict=True)
        ]
        return Accumulation(target, partials, lse, None, denominator)

    @property
    def _divides(self) -> bool:
        """Whether the sum divides the target, which changes all its rows."""
        return self.denominator is None and self.partials[0].denominator is not None

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        wide = torch.promote_types(self.target.dtype, torch.float32)
        return torch.promote_types(self.partials[0].x.dtype, wide) if self.partials else wide
