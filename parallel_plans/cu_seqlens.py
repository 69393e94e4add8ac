"""Compute the boundaries of packed documents, in the form that attention takes."""

from __future__ import annotations

import torch
from torch import Tensor


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
    return filled_boundaries(starts.nonzero().cpu(), *starts.shape)


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
