"""Boundaries of packed documents, as attention takes them, and the order of sharded tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import Contiguous, relayout
from dtensor_ring.extension import Layout, gather_rows


def boundaries(starts: Tensor) -> Tensor:
    """Return where documents start and the last one ends, padded with empty documents.

    The length has room for one document per token, so that graphs do not depend on the batch.

    Args:
        starts: whether a token is the first of a document, `(B, S)`, on any device.

    Returns:
        `cu_seqlens`, int32 on the CPU: `(S+1,)` for one row, else `(B, S+1)`.

    Example:
        >>> boundaries(torch.tensor([[True, False, False, True]])).tolist()
        [0, 3, 4, 4, 4]
    """
    num_rows, seq_len = starts.shape
    return filled_boundaries(starts.nonzero().cpu(), num_rows, seq_len)


def filled_boundaries(
    starts: Tensor, num_rows: int, seq_len: int, min_room: int | None = None
) -> Tensor:
    """Return `boundaries` of row and position of the first token of each document, `(D, 2)`.

    By default there is room for one document per token. With `min_room`, there is room for at least
    that number of documents; a row with more gets room for the next power of two.

    Example:
        >>> filled_boundaries(torch.tensor([[0, 0], [0, 3]]), 1, 4).tolist()
        [0, 3, 4, 4, 4]
    """
    rows, columns = starts.unbind(1)
    counts = rows.bincount(minlength=num_rows)
    places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    room = seq_len
    if min_room is not None:
        # Powers of two: boundaries have few shapes, and graphs are compiled for few.
        room = min(seq_len, max(min_room, 1 << int(counts.max() - 1).bit_length()))
    bounds = torch.full((num_rows, room + 1), seq_len, dtype=torch.int32)
    bounds[rows, places] = columns.int()
    return bounds[0] if num_rows == 1 else bounds


def traced_boundaries(starts: Tensor) -> Tensor:
    """Return `boundaries` of starts that are not known yet, while a compiler traces.

    Example:
        >>> traced_boundaries(torch.tensor([[True, False, False, True]])).tolist()
        [0, 3, 4, 4, 4]
    """
    seq_len = starts.shape[1]
    index = torch.arange(seq_len, device=starts.device)
    # Sorting puts the starts first; all other tokens become empty documents at the end.
    bounds = torch.where(starts, index, seq_len).sort(-1).values
    bounds = torch.nn.functional.pad(bounds, (0, 1), value=seq_len).int().cpu()
    return bounds[0] if len(bounds) == 1 else bounds


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
        rank, world_size = self._mesh.get_local_rank(), self._mesh.size()
        return self._order.runs(rank, world_size, self._seq_len)[0].start

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
        # The edges of all ranks to all of them: a few bytes, in a call that all make alike.
        every = gather_rows(edge.reshape(1, -1), [1] * self._mesh.size(), self._mesh)
        rank = self._mesh.get_local_rank() + step
        return every[rank].view_as(edge) if 0 <= rank < self._mesh.size() else None
