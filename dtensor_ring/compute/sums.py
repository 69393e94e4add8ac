"""What is put together: parts of a tensor, and the sum or mean that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_ring.compute.memory import WHOLE, Region, part_of, region
from dtensor_ring.planning.ranges import Span


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A region of `(B, N, L)`: `x` `(B', N, R, H)`, and `lse` `(B', N, R)` of a partial result.

    With a `denominator` `(B', N, R)`, `x` is still to be divided by it, and its logarithm to be
    added to `lse`; see Note [Division at the end].
    """

    at: Region
    x: Tensor
    lse: Tensor | None = None
    denominator: Tensor | None = None

    def spans(self, shape: Sequence[int]) -> tuple[Span, Span]:
        """The batch rows and the tokens, of a tensor of that shape."""
        batches, _, tokens = self.at
        return batches.indices(shape[0])[:2], tokens.indices(shape[2])[:2]


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """What becomes of parts. A row of no part becomes 0, with a log-sum-exp of -inf.

    Without `lse`, the parts are added. With it they are outputs over disjoint keys, and merge to a
    mean: `lse' = log(sum(exp(lse)))` and `x' = sum(x * exp(lse - lse'))` (Milakov and Gimelshein,
    2018, arXiv 1805.02867). Arithmetic is float32 or wider, and rounds once.

    Attributes:
        target: `(B, N, L, H)`, overwritten; it may be the memory of the first part.
        parts: the last stride of each is 1.
        lse: `(B, N, L)`, overwritten; it is that of the first part if `target` is.
        sinks: one logit for each head `(N,)`, which takes part with a value of 0.
        denominator: `(B, N, L)`, that of the first part if `target` is its memory, or ones. It is
            updated, and the target is not divided by it yet. On CPUs only.
    """

    target: Tensor
    parts: Sequence[Part]
    lse: Tensor | None = None
    sinks: Tensor | None = None
    denominator: Tensor | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether the first part is the target."""
        return bool(self.parts) and self.parts[0].x is self.target

    def cropped(self) -> Sum:
        """The same without the rows before and after all parts that join what is there already."""
        if not self.is_in_place or self._divides or self.sinks is not None:
            return self
        spans = [part.spans(self.target.shape)[1] for part in self.parts[1:]]
        rows = min((x[0] for x in spans), default=0), max((x[1] for x in spans), default=0)
        if rows == (0, self.target.shape[2]):
            return self
        where = region(None, rows)
        mine = self.target, self.lse, self.denominator
        target, lse, denominator = (None if x is None else part_of(x, where) for x in mine)
        assert target is not None
        parts = [Part(WHOLE, target, lse, denominator)]
        parts += [
            Part((part.at[0], part.at[1], slice(first - rows[0], end - rows[0])), part.x, part.lse)
            for part, (first, end) in zip(self.parts[1:], spans, strict=True)
        ]
        return Sum(target, parts, lse, None, denominator)

    @property
    def _divides(self) -> bool:
        """Whether all rows change, not only those that parts join."""
        return self.denominator is None and self.parts[0].denominator is not None

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        wide = torch.promote_types(self.target.dtype, torch.float32)
        return torch.promote_types(self.parts[0].x.dtype, wide) if self.parts else wide
