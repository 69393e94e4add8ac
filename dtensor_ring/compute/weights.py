"""The weights by which outputs over disjoint keys merge to a mean."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.compute.memory import Region, part_of
from dtensor_ring.compute.sums import Sum

MAX_WEIGHT = 2.0**20
"""Of a part next to what came first, as much as of a million keys."""


class Weights:
    """The log-sum-exp of the sum so far, and the weights of the parts that are added to it.

    Note [Division at the end]: a part joins by `out + part * weight`, one pass over memory, with
    `weight = exp(lse of the part - lse)`. Its lse stays that of the first part, whose weight is 1.
    The sum of the weights is the denominator, which divides once, after the last part, as in the
    kernels of flash attention (Milakov and Gimelshein, 2018, arXiv 1805.02867). Nothing is
    subtracted, so that infinite outputs stay infinite. Finite ones may overflow if they are within
    `MAX_WEIGHT` times the number of parts of the largest float; kernels add up as many values.

    Args:
        one: whose `lse` and `denominator` are written.
    """

    def __init__(self, one: Sum) -> None:
        assert one.lse is not None, "sums have no weights"
        first = one.parts[0]
        ours = one.denominator
        if ours is None and one.is_in_place:
            ours = first.denominator
        self._lse, self._denominator = one.lse, torch.ones_like(one.lse) if ours is None else ours
        self._is_divided = first.denominator is None
        if not one.is_in_place:
            self._start(first.at, first.lse, first.denominator)

    def _start(self, at: Region, lse: Tensor | None, denominator: Tensor | None) -> None:
        assert lse is not None, "all parts have one, or none has"
        self._lse.fill_(-torch.inf)
        part_of(self._lse, at).copy_(lse)
        if denominator is not None:
            part_of(self._denominator, at).copy_(denominator)

    def join(self, at: Region, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The weight of a part, and the factor of the sum so far, or `None`; `(B, N, R, 1)`."""
        assert lse is not None, "all parts have one, or none has"
        so_far, denominator = part_of(self._lse, at), part_of(self._denominator, at)
        # A look at the weights is cheap on a CPU; on a GPU the host would wait for the answer.
        if lse.is_cpu:
            weight = (lse - so_far).exp_()
            if not weight.numel() or weight.amax().item() <= MAX_WEIGHT:
                denominator.add_(weight)
                self._is_divided = False
                return weight.unsqueeze(-1), None
        # What came first is next to nothing, or nothing at all, or a score is inf or nan: divide
        # now, and start anew. A row that neither side has seen gives -inf - -inf, which is nan.
        so_far.add_(denominator.log())
        weight = (lse - so_far).sigmoid_().nan_to_num_(0.0)
        kept = (so_far - lse).sigmoid_().nan_to_num_(1.0).div_(denominator)
        torch.logaddexp(so_far, lse, out=so_far)
        denominator.fill_(1.0)
        return weight.unsqueeze(-1), kept.unsqueeze(-1)

    def divide(self, sinks: Tensor | None) -> Tensor | None:
        """The factor that outputs are left with, `(B, N, L, 1)`; `None` is 1. The lse is whole."""
        factor = None
        if not self._is_divided:
            self._lse.add_(self._denominator.log())
            factor = self._denominator.reciprocal()
        if sinks is not None:
            share = sink_weight(self._lse, sinks)
            factor = share if factor is None else factor.mul_(share)
            torch.logaddexp(self._lse, sinks.to(self._lse.dtype).view(1, -1, 1), out=self._lse)
        return None if factor is None else factor.unsqueeze(-1)


def sink_weight(lse: Tensor, sinks: Tensor) -> Tensor:
    """What sinks leave of each row's output, between 0 and 1, `(B, N, L)`."""
    # -inf - -inf is nan where neither the row nor the sink has weight; the row's own 0 stays.
    return (lse - sinks.to(lse.dtype).view(1, -1, 1)).sigmoid_().masked_fill_(lse == -torch.inf, 0)
