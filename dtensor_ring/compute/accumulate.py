"""Accumulates the partial outputs and gradients that launches return."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_ring.compute.memory import (
    TOKEN_MAJOR,
    WHOLE,
    Order,
    Region,
    add,
    empty,
    in_order,
    order_of,
)
from dtensor_ring.compute.merge import MAX_PARTS, put_together
from dtensor_ring.compute.sums import Part, Sum
from dtensor_ring.planning.demand import Cols


class Parts:
    """Partial results of a tensor `(B, N, L, H)`, one from each launch.

    Note [Parts at once]: a part stays in the dtype of the kernel until there are `room` of them.
    Then one pass over memory merges them, in float32 or wider. More room saves passes over the
    float32 tensor, which is twice as large as a part of 16 bits. The last parts are merged directly
    into memory of the result's dtype. So merging rounds every number once; kernels round, too.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the result.
        order: memory order of the result, which is dense.
        room: the largest number of parts to keep. `None` keeps parts as long as this takes no more
            memory than adding each one to a float32 tensor immediately.
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
        """Keep a part and its lse, if it has one; `x` may be overwritten."""
        self.make_room()
        self._parts.append(Part(at, x, lse))

    def make_room(self) -> None:
        """Merge the parts if there is no room for another, before a kernel allocates it."""
        if self._is_full():
            self._parts = [self._together(self._wide)]

    def merged(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the tensor in its dtype and order, and its lse `(B, N, L)` or `None`."""
        first = self._parts[0]
        is_final = first.denominator is None and sinks is None and self._is_whole(first)
        if len(self._parts) > 1 or not is_final:
            first = self._together(self._dtype, sinks, divided=True)
        return in_order(first.x, self._order, self._dtype), first.lse

    def total(self, is_last: bool) -> Tensor:
        """Return the sum so far, to add to. It is wide unless only the last addend is missing."""
        first = self._parts[0]
        if (
            len(self._parts) > 1
            or not self._is_whole(first)
            or not (is_last or first.x.dtype == self._wide)
        ):
            self._parts = [self._together(self._wide)]
        return self._parts[0].x

    def into(self, total: Tensor, is_new: bool) -> Sum:
        """Return a `Sum` that adds the parts to `total`, or overwrites it if `is_new`."""
        return Sum(total, [*([] if is_new else [Part(WHOLE, total)]), *self._parts])

    def _is_full(self) -> bool:
        if len(self._parts) < 2:
            return False
        # A merged float32 tensor at the front is the running total and does not count as a part.
        kept = self._parts[self._is_total(self._parts[0]) :]
        is_many = kept[0].x.is_cuda and len(self._parts) >= MAX_PARTS
        return is_many or sum(part.x.numel() for part in kept) >= self._num_kept() * self._size

    def _num_kept(self) -> int:
        if self._room is not None:
            return self._room
        # Two narrow parts and the wide tensor take as much memory as one part, the wide tensor and
        # the result. CPUs gain nothing from more room: they merge in place, in one pass.
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
        """Merge all parts into one of this dtype. On CPUs it has a denominator unless `divided`."""
        first = self._parts[0]
        denominator = None
        # If the first part is the wide running total, merge the others into it in place.
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


class Partial(Parts):
    """The running (out, lse) of the local queries. Sinks enter in the last merge.

    Args:
        query: the local queries `(B, N, L, H)`.
        value_head_dim: head dim of the outputs.
        sinks: one logit for each head `(N,)`; see `dtensor_ring.compute.sinks`.
        dtype: dtype of the result; by default the query's.
        room: the largest number of parts to keep, see `Parts`.
    """

    def __init__(
        self,
        query: Tensor,
        value_head_dim: int,
        sinks: Tensor | None = None,
        dtype: torch.dtype | None = None,
        room: int | None = None,
    ) -> None:
        shape = *query.shape[:3], value_head_dim
        super().__init__(shape, dtype or query.dtype, order_of(query), room)
        self._query, self._sinks = query, sinks

    def result(self) -> tuple[Tensor, Tensor]:
        """Return `out` `(B, N, L, Hv)`, in the query's memory order, and `lse` `(B, N, L)`."""
        if not self._parts:
            self._add_nothing()
        out, lse = self.merged(self._sinks)
        assert lse is not None, "all parts of a partial result have one"
        return out, lse.contiguous()

    def _add_nothing(self) -> None:
        """Add the result over no keys: outputs of 0 and an lse of -inf."""
        out = empty(self._query, self._shape, self._order, self._dtype).zero_()
        lse = self._query.new_full(self._shape[:3], -torch.inf, dtype=self._wide)
        self.add(WHOLE, out, lse)


class GradientSum:
    """The sum of the launches' gradients of one tensor `(B, N, L, H)`.

    Args:
        like: a tensor of the same shape, dtype and device.
        room: the largest number of gradients to keep before they are added, see `Parts`.
    """

    def __init__(self, like: Tensor, room: int | None = None) -> None:
        self._like = like
        self._parts = Parts(like.shape, like.dtype, TOKEN_MAJOR, room)

    def make_room(self) -> None:
        """Add up the kept gradients if there is no room for another."""
        self._parts.make_room()

    def add(self, at: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, L)`; `grad` may be overwritten."""
        self._parts.add(at, grad)

    def add_arrived(self, arrived: Tensor, cols: Cols, is_last: bool) -> None:
        """Add the sum that arrived from other ranks for these columns.

        Args:
            arrived: the columns, packed side by side.
            cols: places of the columns in the tensor.
            is_last: whether this is the last addend; then the sum is rounded to its dtype.
        """
        # Adding to narrow memory rounds, so only the last addend may do it.
        total = self._parts.total(is_last) if self._parts else self._zeros()
        add(total, arrived, cols)

    def result(self) -> Tensor:
        """Return the sum in the tensor's dtype, token-major."""
        if not self._parts:
            self._zeros()
        return self._parts.merged()[0]

    def _zeros(self) -> Tensor:
        self.add(WHOLE, empty(self._like, self._like.shape, TOKEN_MAJOR).zero_())
        return self._parts.total(is_last=False)


class GradientShare:
    """One step's gradients of a shard, kept until the sum over the other ranks arrives.

    Args:
        like: a tensor of the shape `(B, N, C, H)`, dtype and device of the gradients.
    """

    def __init__(self, like: Tensor) -> None:
        # With more room, many overlapping launches would hold many times the memory of a shard.
        self._parts = Parts(like.shape, like.dtype, TOKEN_MAJOR, room=1)

    def make_room(self) -> None:
        """Add up the kept gradients if there is no room for another."""
        self._parts.make_room()

    def add(self, at: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, C)`; `grad` may be overwritten."""
        self._parts.add(at, grad)

    def to_add(self, total: Tensor, first: bool) -> Sum:
        """Return a `Sum` that adds the gradients to `total`, or overwrites it if `first`."""
        return self._parts.into(total, first)
