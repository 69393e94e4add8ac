"""Merges partial results: sums of gradients, and means of outputs weighted by log-sum-exp.

A partial result of attention is (out, lse). Two partial results over disjoint keys merge exactly
(Milakov and Gimelshein, 2018, arXiv 1805.02867); (0, -inf) is the identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.memory import WHOLE, Accumulation, Partial, Region, columns, part_of
from dtensor_ring.compute.trace import note_pass
from dtensor_ring.planning.ranges import Span

# The largest relative weight of a partial that joins without a division: about a million keys.
MAX_WEIGHT = 2.0**20


class Weights:
    """The lse of the sum so far, and the weights of the partials that are added to it.

    Note [Division at the end]: a partial joins by `out + partial * weight`, one pass over memory,
    with `weight = exp(lse of the partial - lse)`. Here `lse` stays that of the first partial, whose
    weight is 1. The denominator is the sum of the weights. It divides once, after the last partial,
    as in kernels of flash attention (Milakov and Gimelshein, 2018, arXiv 1805.02867). Nothing is
    subtracted, which keeps infinite outputs infinite. A finite output overflows only if it exceeds
    the largest float divided by `MAX_WEIGHT` and the number of partials.

    Args:
        one: the sum whose `lse` and `denominator` are written.
    """

    def __init__(self, one: Accumulation) -> None:
        assert one.lse is not None, "sums have no weights"
        first = one.partials[0]
        ours, is_there = one.denominator, one.lse is first.lse
        if ours is None and is_there:
            ours = first.denominator
        self._lse, self._denominator = one.lse, torch.ones_like(one.lse) if ours is None else ours
        self._is_divided = first.denominator is None
        if not is_there:
            self._start(first.region, first.lse, first.denominator)

    def _start(self, region: Region, lse: Tensor | None, denominator: Tensor | None) -> None:
        assert lse is not None, "all partials have one, or none has"
        if lse.shape != self._lse.shape:
            self._lse.fill_(-torch.inf)
        part_of(self._lse, region).copy_(lse)
        if denominator is not None:
            part_of(self._denominator, region).copy_(denominator)

    def join(self, region: Region, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a partial's weight, and the factor of the sum so far or `None`, `(B, N, R, 1)`."""
        assert lse is not None, "all partials have one, or none has"
        so_far, denominator = part_of(self._lse, region), part_of(self._denominator, region)
        # Reading the largest weight is cheap on a CPU; on a GPU it would make the host wait.
        if lse.is_cpu:
            weight = (lse - so_far).exp_()
            if not weight.numel() or weight.max().item() <= MAX_WEIGHT:
                denominator.add_(weight)
                self._is_divided = False
                return weight.unsqueeze(-1), None
        # The sum so far has almost no weight, or a score is inf or nan: divide now, so that the
        # denominator is 1 again. A row that neither side has seen gives -inf - -inf, which is nan.
        so_far.add_(denominator.log())
        weight = (lse - so_far).sigmoid_().nan_to_num_(0.0)
        kept = (so_far - lse).sigmoid_().nan_to_num_(1.0).div_(denominator)
        torch.logaddexp(so_far, lse, out=so_far)
        denominator.fill_(1.0)
        return weight.unsqueeze(-1), kept.unsqueeze(-1)

    def divide(self, sinks: Tensor | None) -> Tensor | None:
        """Complete the lse, and return the remaining factor of outputs; `None` means 1."""
        factor = None
        if not self._is_divided:
            # `lse` is still that of the first partial; the denominator completes it.
            self._lse.add_(self._denominator.log())
            factor = self._denominator.reciprocal()
        if sinks is not None:
            share = sink_weight(self._lse, sinks)
            factor = share if factor is None else factor.mul_(share)
            torch.logaddexp(self._lse, sinks.to(self._lse.dtype).view(1, -1, 1), out=self._lse)
        return None if factor is None else factor.unsqueeze(-1)


def sink_weight(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of each row's output that sinks leave, from 0 to 1, `(B, N, L)`."""
    # -inf - -inf is nan where neither the row nor the sink has weight; the output there is 0.
    return (lse - sinks.to(lse.dtype).view(1, -1, 1)).sigmoid_().masked_fill_(lse == -torch.inf, 0)


# Numbers that are cast at a time: 256 KiB of float32, which stay in a core's cache.
CAST_SIZE = 1 << 16

# The largest number of partials that one launch on a GPU merges.
MAX_PARTIALS = 8


def accumulate_sums(*sums: Accumulation) -> None:
    """Compute the sums: one, or two of the same batch, heads and rows, in one launch on a GPU."""
    sums = tuple(map(Accumulation.cropped, sums))
    if sums[0].target.is_meta:  # a dry run: no numbers to add
        return note_pass("merge", sum(one.num_bytes for one in sums))
    if sums[0].target.is_cuda and has_triton():
        from dtensor_ring.compute.merge_triton import accumulate_sums as fused

        fused(*sums)
        return
    for one in sums:
        _by_ranges(one)


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; then GPUs merge partials in one launch."""
    return find_spec("triton") is not None


class _Addend(NamedTuple):
    """A part that joins the sum: `so_far * kept + x * weight`, where `None` means 1."""

    x: Tensor
    weight: Tensor | None = None
    kept: Tensor | None = None

    def narrow(self, where: tuple[Span, Span]) -> _Addend:
        """Return this part for a range of batch rows and of tokens."""
        weight, kept = self.weight, self.kept
        return _Addend(
            _narrow(self.x, where),
            None if weight is None else _narrow(weight, where),
            None if kept is None else _narrow(kept, where),
        )


def _narrow(x: Tensor, where: tuple[Span, Span]) -> Tensor:
    (first, end), tokens = where
    return columns(x[first:end] if end - first < x.shape[0] else x, tokens)


def _by_ranges(one: Accumulation) -> None:
    """Compute a sum by ranges of rows that have the same partials."""
    target, shape = one.target, one.target.shape
    shapes = [partial.x.shape for partial in one.partials]
    is_whole = bool(shapes) and shapes.count(shape) == len(shapes)
    if is_whole and one.lse is None and len(shapes) == 1:  # as most sums that begin to travel
        target.copy_(one.partials[0].x)
        return
    addends, scale = _addends(one)
    if is_whole:
        _put(target, addends, scale, one.wide, one.is_in_place)
        return
    spans = [partial.spans(shape) for partial in one.partials]
    # If every partial has all batch rows, all batch rows have the same ranges.
    by_row = any(end - first < shape[0] for (first, end), _ in spans)
    for batches in [(b, b + 1) for b in range(shape[0])] if by_row else [(0, shape[0])]:
        here = [
            (*tokens, number)
            for number, ((first, end), tokens) in enumerate(spans)
            if first <= batches[0] and batches[1] <= end
        ]
        for tokens, numbers in _ranges(here, shape[2]):
            found = [
                addends[x].narrow((_from(batches, spans[x][0]), _from(tokens, spans[x][1])))
                for x in numbers
            ]
            there = batches, tokens
            scaled = None if scale is None else _narrow(scale, there)
            is_there = one.is_in_place and numbers[:1] == [0]
            _put(_narrow(target, there), found, scaled, one.wide, is_there)


def _from(span: Span, whole: Span) -> Span:
    return span[0] - whole[0], span[1] - whole[0]


def _ranges(spans: list[tuple[int, int, int]], size: int) -> Iterator[tuple[Span, list[int]]]:
    """Yield the ranges between bounds of spans, each with the numbers of the spans that cover it.

    >>> list(_ranges([(0, 4, 0), (2, 6, 1)], 7))
    [((0, 2), [0]), ((2, 4), [0, 1]), ((4, 6), [1]), ((6, 7), [])]
    """
    # Between two cuts the same partials cover all rows, so each range is a few whole operations:
    #     partial 0    |-----------|
    #     partial 1          |-----------|
    #     cuts         0     2     4     6  7
    cuts = sorted({0, size, *[cut for first, end, _ in spans for cut in (first, end)]})
    # Descending, as the end of a list is popped in constant time.
    later = sorted(spans, reverse=True)
    active: list[tuple[int, int, int]] = []
    for first, end in pairwise(cuts):
        while later and later[-1][0] <= first:
            active.append(later.pop())
        active = [span for span in active if span[1] > first]
        # Sort into the order of the partials, so sums do not depend on where ranges are cut.
        yield (first, end), sorted(number for _, _, number in active)


def _addends(one: Accumulation) -> tuple[list[_Addend], Tensor | None]:
    """Write the lse, and return the partials with their weights and the final factor of the sum."""
    if one.lse is None:
        return [_Addend(partial.x) for partial in one.partials], None
    first, *others = one.partials
    weights = Weights(one)
    joining: list[_Addend] = []
    for partial in others:  # in this order, as each changes the lse that the next one joins
        weight, kept = weights.join(partial.region, partial.lse)
        joining.append(_Addend(partial.x, weight, kept))
    scale = weights.divide(one.sinks) if one.denominator is None else None
    return [_Addend(first.x), *joining], scale


def _put(
    target: Tensor,
    addends: list[_Addend],
    scale: Tensor | None,
    wide: torch.dtype,
    is_there: bool,
) -> None:
    """Write rows that have the same partials; with `is_there`, `target` already holds the first."""
    if not addends:
        target.zero_()
        return
    first, *others = addends
    is_alone = not others and scale is None  # a plain copy may cast
    # A product needs operands of one dtype, an addition does not.
    mixed = [x for x in others if x.x.dtype != wide and x.weight is not None]
    if is_alone or (target.dtype == wide and not mixed):
        # The first sum or product reads the first part where it is.
        is_read = is_there or (first.x.dtype == wide and not is_alone)
        _join(target, first.x if is_read else target.copy_(first.x), others, scale)
    else:
        _by_chunks(target, addends, scale, wide, is_there)


def _join(total: Tensor, so_far: Tensor, others: list[_Addend], scale: Tensor | None) -> None:
    """Write the sum of `so_far`, which may be `total` itself, and others to `total`."""
    # Every operation writes to `total`, so that none allocates a tensor.
    for x, weight, kept in others:
        if kept is not None:
            so_far = torch.mul(so_far, kept, out=total)
        if weight is None:
            so_far = torch.add(so_far, x, out=total)
        else:
            so_far = torch.addcmul(so_far, x, weight, out=total)
    if scale is not None:
        torch.mul(so_far, scale, out=total)


def _by_chunks(
    target: Tensor,
    addends: list[_Addend],
    scale: Tensor | None,
    wide: torch.dtype,
    is_there: bool,
) -> None:
    """Compute some rows at a time, in the wide dtype.

    Small chunks keep the casts in cache and reuse two scratch buffers.
    """
    batch, _, num_rows, _ = target.shape
    # A chunk is some rows of all heads, so weights and outputs are sliced alike.
    at_a_time = max(1, CAST_SIZE * num_rows // max(1, target.numel()))
    like = target[..., :at_a_time, :]
    total, cast = (torch.empty_like(like, dtype=wide) for _ in range(2))
    for start in range(0, num_rows, at_a_time):
        where = (0, batch), (start, min(num_rows, start + at_a_time))
        some = (0, batch), (0, where[1][1] - start)
        (first, *_), *others = (x.narrow(where) for x in addends)
        partial = _narrow(target, where)
        joined = (
            partial if is_there and partial.dtype == wide else _narrow(total, some).copy_(first)
        )
        for other in others:
            x = other.x if other.x.dtype == wide else _narrow(cast, some).copy_(other.x)
            _join(joined, joined, [other._replace(x=x)], None)
        if scale is not None:
            joined.mul_(_narrow(scale, where))
        if joined is not partial:
            partial.copy_(joined)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block into `out` `(B, N, L, H)` and `lse` `(B, N, L)`, in place.

    A row that neither side has seen stays (0, -inf).

    Args:
        out: the output so far, overwritten.
        lse: log-sum-exp of `out`, overwritten.
        block_out: the output over other keys.
        block_lse: log-sum-exp of `block_out`.
    """
    partials = Partial(WHOLE, out, lse), Partial(WHOLE, block_out, block_lse)
    accumulate_sums(Accumulation(out, partials, lse))


def merge_stacked(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the merged `(out, lse)` of W partial results `(W, ..., H)` and `(W, ...)`.

    The partials are merged in their order, so ranks that have the same partials get the same bits.

    >>> merge_stacked(torch.tensor([[0.0], [4.0]]), torch.zeros(2))[0]
    tensor([2.])
    """
    # In a row that no partial has seen, -inf - -inf is nan; its weight is 0.
    weights = lses.unsqueeze(-1).softmax(0).nan_to_num_(0.0)
    return (outs * weights).sum(0), lses.logsumexp(0)


# May stand for the lse -inf of a row that a partial has not seen: another lse outweighs it, too.
UNSEEN = torch.finfo(torch.float32).min


def merge_outputs(outs: Tensor, lses: Tensor) -> Tensor:
    """Return the merged output of `merge_stacked`, without its lse, by an op less.

    Args:
        outs: the partial outputs `(W, ..., H)`.
        lses: log-sum-exp of each `(W, ..., 1)`; in each row, one or more are at least `UNSEEN`.
    """
    return (outs * lses.softmax(0)).sum(0)


def merge_ragged(
    outs: Tensor, lses: Tensor, groups: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the merged `(out, lse)` of groups of partial results, of any size each.

    >>> outs, groups = torch.tensor([[0.0], [4.0], [5.0]]), torch.tensor([0, 0, 1])
    >>> merge_ragged(outs, torch.zeros(3), groups, torch.tensor([2, 1]))[0]
    tensor([[2.],
            [5.]])

    Args:
        outs: the partial outputs `(P, ..., H)`, group by group.
        lses: log-sum-exp of each `(P, ...)`, float32 or wider.
        groups: the group of each partial, `(P,)`, ascending.
        counts: the number of partials of each group `(G,)`, at least 1.
    """
    if len(counts) == len(groups):
        return outs, lses

    def reduced(x: Tensor, how: str) -> Tensor:
        # The check that `unsafe` leaves out reads the counts on the host, which waits for them.
        return torch.segment_reduce(x, how, lengths=counts, unsafe=True)

    largest = reduced(lses, "max")
    # In a row that no partial has seen, -inf - -inf is nan; its weight is 0.
    weights = (lses - largest[groups]).exp_().nan_to_num_(0.0)
    total = reduced(weights, "sum")
    # The largest weight is 1, so only such a row has a total of 0.
    out = reduced(outs * weights.unsqueeze(-1), "sum").div_(total.clamp_min(1.0).unsqueeze(-1))
    return out, largest.add_(total.log_())


def merge_gradients(
    grad_out: Tensor, grad_lse: Tensor, outs: list[Tensor], lses: list[Tensor], lse: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the outputs and lse of the partials that `merge_` merged.

    The merged output is the mean of the partials, with weights `w = exp(lse of the partial - lse)`.
    So the gradient of a partial's output is `w * grad_out`, and that of its lse `w * (p - mean of
    all p + grad_lse)` with `p = sum(grad_out * out of the partial)`. Both are 0 in rows that the
    partial has not seen.

    Args:
        grad_out: gradient of the merged output `(..., L, H)`.
        grad_lse: gradient of the merged lse `(..., L)`.
        outs: outputs of the partials.
        lses: log-sum-exp of each partial.
        lse: the merged log-sum-exp.
    """
    wide = grad_out.to(lse.dtype)
    products = [(wide * out).sum(-1) for out in outs]
    # In a row that no partial has seen, -inf - -inf is nan.
    unseen = [partial == -torch.inf for partial in lses]
    weights = [
        (partial - lse).exp().masked_fill(hidden, 0.0)
        for partial, hidden in zip(lses, unseen, strict=True)
    ]
    # d lse / d lse_i = w_i, and d out / d lse_i = w_i (out_i - out): the mean is subtracted, as
    # outputs stay where they are if all lse change alike.
    slope = grad_lse - sum(w * p for w, p in zip(weights, products, strict=True))
    grad_outs = [(wide * weight.unsqueeze(-1)).to(grad_out.dtype) for weight in weights]
    grad_lses = [
        (weight * (product + slope)).masked_fill(hidden, 0.0)  # 0 times nan is nan
        for weight, product, hidden in zip(weights, products, unseen, strict=True)
    ]
    return grad_outs, grad_lses
