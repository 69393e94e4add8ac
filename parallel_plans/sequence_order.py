"""Brings numbers of sharded tokens into contiguous order, where most neighbours are on one rank."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import Contiguous, relayout
from dtensor_ring.extension import Layout, gather_rows


class SequenceOrder:
    """Exchanges numbers of this rank's tokens for those of a contiguous part of the sequence.

    There only the first and the last token of a rank have a neighbour on another one. Numbers are
    positions, labels or masks, `(B, L)`, of one integer dtype.

    Args:
        mesh: the mesh of the axis.
        layout: the layout in which tokens are sharded.
        seq_len: tokens of a row on all ranks; no rank may be without tokens.
        order: the layout in which neighbours are on one rank.
    """

    def __init__(
        self, mesh: DeviceMesh, layout: Layout, seq_len: int, order: Layout | None = None
    ) -> None:
        self._mesh, self._layout, self._seq_len = mesh, layout, seq_len
        self._order = order or Contiguous()

    @property
    def begin(self) -> int:
        """The position of this rank's first token in contiguous order."""
        place = self._mesh.get_local_rank(), self._mesh.size()
        return self._order.runs(*place, self._seq_len)[0].start

    def contiguous(self, x: Tensor) -> Tensor:
        """Return the numbers of the tokens from `begin` on."""
        options = {"layout": self._layout, "seq_len": self._seq_len}
        return relayout(x, self._mesh, 1, self._order, **options)

    def as_sharded(self, x: Tensor) -> Tensor:
        """Return the numbers of this rank's own tokens: the reverse of `contiguous`."""
        options = {"layout": self._order, "seq_len": self._seq_len}
        return relayout(x, self._mesh, 1, self._layout, **options)

    def of_neighbour(self, edge: Tensor, step: int) -> Tensor | None:
        """Return the edge, `(B, 1)`, of the rank before (-1) or after (1), if there is one."""
        every = gather_rows(edge.reshape(1, -1), [1] * self._mesh.size(), self._mesh)
        rank = self._mesh.get_local_rank() + step
        return every[rank].view_as(edge) if 0 <= rank < self._mesh.size() else None
