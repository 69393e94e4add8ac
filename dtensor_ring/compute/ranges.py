"""Columns of tensors `(B, N, L, H)`, copied and added: range by range, or by an index of them all.

A range costs a launch, a column of an index hardly anything: it is read next to what it is of.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dtensor_ring.compute.memory import columns
from dtensor_ring.compute.numbers import Numbers
from dtensor_ring.planning.routes.columns import Cols
from dtensor_ring.planning.values.span import Span

FEW = 8
"""Ranges up to which one copy of each is as quick as one by an index."""

_INDICES: WeakKeyDictionary[Cols, Numbers] = WeakKeyDictionary()
"""The columns one by one, made once: they live as long as their plan."""


def pack(packed: Tensor, x: Tensor, cols: Cols) -> None:
    """Copy these columns of `x`, which become those of `packed`, side by side."""
    if len(cols.spans) <= FEW:
        for span, part in _parts(packed, cols):
            part.copy_(columns(x, span))
    elif packed.dtype == x.dtype:
        torch.index_select(x, 2, _index(cols, x.device), out=packed)
    else:
        packed.copy_(x.index_select(2, _index(cols, x.device)))


def unpack(x: Tensor, packed: Tensor, cols: Cols) -> None:
    """Copy columns that lie side by side to these columns of `x`."""
    if len(cols.spans) <= FEW:
        for span, part in _parts(packed, cols):
            columns(x, span).copy_(part)
    else:
        x.index_copy_(2, _index(cols, x.device), packed)


def add(total: Tensor, packed: Tensor, cols: Cols) -> None:
    """Add columns that lie side by side to these columns of a sum, rounded once.

    Args:
        total: the sum.
        packed: the columns to add; their dtype may differ from that of the sum.
        cols: where it is added.
    """
    if len(cols.spans) <= FEW:
        for span, part in _parts(packed, cols):
            columns(total, span).add_(part)
        return
    index = _index(cols, total.device)
    if packed.dtype == total.dtype:
        total.index_add_(2, index, packed)
    else:
        total.index_copy_(2, index, total.index_select(2, index).add_(packed))


def _parts(packed: Tensor, cols: Cols) -> Iterable[tuple[Span, Tensor]]:
    """Each span, and its part of the packed columns."""
    if len(cols.spans) == 1:
        return [(cols.spans[0], packed)]
    places = pairwise(cols.offsets)
    return [(span, columns(packed, at)) for span, at in zip(cols.spans, places, strict=True)]


def _index(cols: Cols, device: torch.device) -> Tensor:
    """The columns, one by one."""
    numbers = _INDICES.get(cols)
    if numbers is None:
        # Two threads may both get here; either result serves.
        numbers = _INDICES[cols] = Numbers(torch.int64, _listed(cols))
    return numbers.on(device)[0]


def _listed(cols: Cols) -> Tensor:
    """The indices of the columns, int64."""
    firsts, ends = torch.tensor(cols.spans, device="cpu").T
    # An index is the place among the packed columns, plus all gaps before its span.
    gaps = firsts - torch.tensor(cols.offsets[:-1], device="cpu")
    return torch.arange(len(cols), device="cpu") + gaps.repeat_interleave(ends - firsts)
