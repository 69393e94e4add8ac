"""What the launches give of one tensor: kept as it is, and put together several parts at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_ring.compute.memory import (
    WHOLE,
    Order,
    Region,
    empty,
    in_order,
)
from dtensor_ring.compute.sums import Part, Sum
from dtensor_ring.compute.together import MAX_PARTS, put_together


class Parts:
    """Parts of a tensor `(B, N, L, H)`, one of each launch.

    Note [Parts at once]: a part stays in the dtype of the kernel until `room` of them are there.
    Then one pass over memory puts them together, in float32 or wider. More room saves passes over
    the float32 tensor, which is twice as large as a part of 16 bits. The last parts go into memory
    of the result's dtype, so merging rounds every number once, in addition to what kernels round
    themselves.

    Args:
        shape: of the tensor.
        dtype: of the result.
        order: of the result, whose memory is dense.
        room: how many parts may be kept; `None` keeps what takes no more memory than to add each
            part to a float32 tensor at once.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, order: Order, room: int | None = None
    ) -> None:
        self._shape, self._dtype, self._order = torch.Size(shape), dtype, order
        self._room = room
        self._wide = torch.promote_types(dtype, torch.float32)
        self._parts: list[Part] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, at: Region, x: Tensor, lse: Tensor | None = None) -> None:
        """Keep a part, which may be written to: of a region, with its log-sum-exp if it is mean."""
        self.make_room()
        self._parts.append(Part(at, x, lse))

    def make_room(self) -> None:
        """Put the parts together if there is no room for another; before a kernel allocates one."""
        if self._is_full():
            self._parts = [self._together(self._wide)]

    def result(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The tensor in its dtype and order, and its log-sum-exp `(B, N, L)`."""
        first = self._parts[0]
        is_final = first.denominator is None and sinks is None and self._is_whole(first)
        if len(self._parts) > 1 or not is_final:
            first = self._together(self._dtype, sinks, divided=True)
        return in_order(first.x, self._order, self._dtype), first.lse

    def total(self, is_last: bool) -> Tensor:
        """The tensor so far, to add to: wide unless the last addend comes, which rounds once."""
        first = self._parts[0]
        if (
            len(self._parts) > 1
            or not self._is_whole(first)
            or not (is_last or first.x.dtype == self._wide)
        ):
            self._parts = [self._together(self._wide)]
        return self._parts[0].x

    def into(self, total: Tensor, is_new: bool) -> Sum:
        """The parts as addends of a sum elsewhere, whose memory is new or has a content."""
        return Sum(total, [*([] if is_new else [Part(WHOLE, total)]), *self._parts])

    def _is_full(self) -> bool:
        if len(self._parts) < 2:
            return False
        # What was put together already is the float32 tensor, not one of the parts.
        kept = self._parts[self._is_total(self._parts[0]) :]
        is_many = kept[0].x.is_cuda and len(self._parts) >= MAX_PARTS
        return is_many or sum(part.x.numel() for part in kept) >= self._num_kept() * self._size

    def _num_kept(self) -> int:
        if self._room is not None:
            return self._room
        # Two narrow parts and a wide tensor need what a part, the tensor and the result needed.
        # CPUs gain nothing: interpolating in place is one pass there.
        is_narrow = self._dtype != self._wide
        return 2 if is_narrow and self._parts[0].x.is_cuda else 1

    @property
    def _size(self) -> int:
        return self._shape.numel()

    def _is_whole(self, part: Part) -> bool:
        return part.x.shape == self._shape

    def _is_total(self, part: Part) -> bool:
        return self._is_whole(part) and part.x.dtype == self._wide

    def _together(
        self, dtype: torch.dtype, sinks: Tensor | None = None, divided: bool = False
    ) -> Part:
        """All parts as one, in that dtype; on CPUs it may have a denominator unless `divided`."""
        first = self._parts[0]
        denominator = None
        # Where the first part is wide memory for the whole tensor already, the others go there.
        if self._is_total(first) and dtype == self._wide:
            target, lse, denominator = first.x, first.lse, first.denominator
        else:
            target = empty(first.x, self._shape, self._order, dtype)
            lse = None if first.lse is None else first.lse.new_empty(self._shape[:3])
        if divided or lse is None or not lse.is_cpu:
            denominator = None
        elif denominator is None:
            denominator = torch.ones_like(lse)
        put_together(Sum(target, self._parts, lse, sinks, denominator))
        return Part(WHOLE, target, lse, denominator)
