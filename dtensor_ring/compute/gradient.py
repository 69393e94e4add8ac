"""Sums of the launches' gradients: for the rank's own shard, and for shards in transit."""

from __future__ import annotations

from torch import Tensor

from dtensor_ring.compute.memory import TOKEN_MAJOR, WHOLE, Region, empty
from dtensor_ring.compute.parts import Parts
from dtensor_ring.compute.ranges import add
from dtensor_ring.compute.sums import Sum
from dtensor_ring.planning.routes.columns import Cols


class GradientSum:
    """The sum of the launches' gradients of one tensor `(B, N, L, H)`.

    Args:
        like: the tensor: its shape, dtype and device.
        room: how many gradients may be kept until they are added, see `Parts`.
    """

    def __init__(self, like: Tensor, room: int | None = None) -> None:
        self._like = like
        self._parts = Parts(like.shape, like.dtype, TOKEN_MAJOR, room)

    def make_room(self) -> None:
        """Add up what is here if another gradient would be one too many."""
        self._parts.make_room()

    def add(self, at: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, L)`, which may be written to."""
        self._parts.add(at, grad)

    def add_arrived(self, arrived: Tensor, cols: Cols, is_last: bool) -> None:
        """Add what other ranks summed up for these columns, and round after the last of it.

        Args:
            arrived: the columns side by side.
            cols: where in the tensor they are.
            is_last: whether nothing else is added.
        """
        # Adding to narrow memory rounds: exact enough only once, with the last addend.
        total = self._parts.total(is_last) if self._parts else self._zeros()
        add(total, arrived, cols)

    def result(self) -> Tensor:
        """The sum in the tensor's dtype, token-major."""
        if not self._parts:
            self._zeros()
        return self._parts.result()[0]

    def _zeros(self) -> Tensor:
        self.add(WHOLE, empty(self._like, self._like.shape, TOKEN_MAJOR).zero_())
        return self._parts.total(is_last=False)


class GradientShare:
    """A step's gradients of a shard in transit, until the sum over the other ranks arrives.

    Args:
        like: the part of the shard `(B, N, C, H)`: its shape, dtype and device.
    """

    def __init__(self, like: Tensor) -> None:
        # Many overlapping launches would hold many shards' worth of memory.
        self._parts = Parts(like.shape, like.dtype, TOKEN_MAJOR, room=1)

    def make_room(self) -> None:
        """Add up what is here if another gradient would be one too many."""
        self._parts.make_room()

    def add(self, at: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, C)`, which may be written to."""
        self._parts.add(at, grad)

    def to_add(self, total: Tensor, first: bool) -> Sum:
        """To add to the sum, or to begin it: then `total` is memory that nothing was written to."""
        return self._parts.into(total, first)
