"""Parts of one tensor, put together in one pass over memory: sums, and means by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.memory import part_of, region
from dtensor_ring.compute.sums import Sum
from dtensor_ring.compute.weights import Weights
from dtensor_ring.planning.values.span import Span

PIECE = 1 << 16
"""Numbers that are cast at a time: 256 KiB of float32, which stay in a core's cache."""

MAX_PARTS = 8
"""Parts of one launch on a GPU."""


def put_together(*sums: Sum) -> None:
    """Write what becomes of parts: of one tensor, or of two of like shapes in one launch."""
    sums = tuple(one.cropped() for one in sums)
    if sums[0].target.is_cuda and has_triton():
        from dtensor_ring.compute.together_triton import put_together as fused

        fused(*sums)
        return
    for one in sums:
        _by_ranges(one)


@cache
def has_triton() -> bool:
    """Whether GPUs put parts together in one launch."""
    return find_spec("triton") is not None


class _Addend(NamedTuple):
    """A part that is added to the sum so far: `so_far * kept + x * weight`, where `None` is 1."""

    x: Tensor
    weight: Tensor | None = None
    kept: Tensor | None = None

    def narrow(self, where: tuple[Span, Span]) -> _Addend:
        """A range of batch rows and of tokens."""
        return _Addend(*(None if x is None else _narrow(x, where) for x in self))  # type: ignore[arg-type]


def _narrow(x: Tensor, where: tuple[Span, Span]) -> Tensor:
    (first, end), tokens = where
    return part_of(x[first:end] if end - first < x.shape[0] else x, region(None, tokens))


def _by_ranges(one: Sum) -> None:
    """Range by range of rows that have the same parts."""
    target, shape = one.target, one.target.shape
    spans = [part.spans(shape) for part in one.parts]
    addends, scale = _addends(one)
    # Regions of all batch rows leave the same gaps in each.
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
    """Ranges up to `size` between the bounds of the spans, with the numbers of those that cover it.

    >>> list(_ranges([(0, 4, 0), (2, 6, 1)], 7))
    [((0, 2), [0]), ((2, 4), [0, 1]), ((4, 6), [1]), ((6, 7), [])]
    """
    cuts = sorted({0, size, *(cut for first, end, _ in spans for cut in (first, end))})
    later = sorted(spans, reverse=True)
    active: list[tuple[int, int, int]] = []
    for first, end in pairwise(cuts):
        while later and later[-1][0] <= first:
            active.append(later.pop())
        active = [span for span in active if span[1] > first]
        # In the order of the parts: sums do not depend on where ranges are cut.
        yield (first, end), sorted(number for _, _, number in active)


def _addends(one: Sum) -> tuple[list[_Addend], Tensor | None]:
    """The parts with their weights, and the factor of all of them after the last; writes lse."""
    if one.lse is None:
        return [_Addend(part.x) for part in one.parts], None
    first, *others = one.parts
    weights = Weights(one)
    joining = [_Addend(part.x, *weights.join(part.at, part.lse)) for part in others]
    scale = weights.divide(one.sinks) if one.denominator is None else None
    return [_Addend(first.x), *joining], scale


def _put(
    target: Tensor,
    addends: list[_Addend],
    scale: Tensor | None,
    wide: torch.dtype,
    is_there: bool,
) -> None:
    """Write rows that have the same parts; the first is there already if `is_there`."""
    if not addends:
        target.zero_()
        return
    first, *others = addends
    is_alone = not others and scale is None  # nothing is joined, so that any dtype may be copied
    # A product wants one dtype, addition does not.
    is_wide = target.dtype == wide and all(x.weight is None or x.x.dtype == wide for x in others)
    if is_alone or is_wide:
        if not is_there:
            target.copy_(first.x)
        _join(target, others, scale)
    else:
        _by_pieces(target, addends, scale, wide, is_there)


def _join(total: Tensor, others: list[_Addend], scale: Tensor | None) -> None:
    for x, weight, kept in others:
        if kept is not None:
            total.mul_(kept)
        if weight is None:
            total.add_(x)
        else:
            total.addcmul_(x, weight)
    if scale is not None:
        total.mul_(scale)


def _by_pieces(
    target: Tensor,
    addends: list[_Addend],
    scale: Tensor | None,
    wide: torch.dtype,
    is_there: bool,
) -> None:
    """Put some rows together at a time, in the wide dtype.

    Small pieces keep the casts in cache and reuse two scratch buffers.
    """
    batch, _, num_rows, _ = target.shape
    # Some rows of all heads, so that weights and outputs are sliced alike.
    at_a_time = max(1, PIECE * num_rows // max(1, target.numel()))
    like = target[..., :at_a_time, :]
    total, cast = (torch.empty_like(like, dtype=wide) for _ in range(2))
    for start in range(0, num_rows, at_a_time):
        where = (0, batch), (start, min(num_rows, start + at_a_time))
        some = (0, batch), (0, where[1][1] - start)
        (first, *_), *others = (x.narrow(where) for x in addends)
        part = _narrow(target, where)
        joined = part if is_there and part.dtype == wide else _narrow(total, some).copy_(first)
        for other in others:
            x = other.x if other.x.dtype == wide else _narrow(cast, some).copy_(other.x)
            _join(joined, [other._replace(x=x)], None)
        if scale is not None:
            joined.mul_(_narrow(scale, where))
        if joined is not part:
            part.copy_(joined)
