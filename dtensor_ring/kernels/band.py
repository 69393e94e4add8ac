"""A band of a tile by blocks of rows, for kernels that have no windows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dtensor_ring.mask import Mask


def row_blocks(
    num_rows: int, num_cols: int, mask: Mask, block_rows: int
) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows, and the columns from the first to the last that any row of them sees."""
    for start in range(0, num_rows, block_rows):
        end = min(num_rows, start + block_rows)
        first = 0 if mask.left is None else max(0, start - mask.left)
        last = num_cols if mask.right is None else min(num_cols, end + mask.right)
        yield slice(start, end), slice(first, last)


def hidden(rows: slice, cols: slice, mask: Mask, device: torch.device) -> Tensor | None:
    """Which columns a row does not see, a boolean `(R, C)`; `None` if all see all."""
    num_rows, num_cols = rows.stop - rows.start, cols.stop - cols.start
    lag = rows.start - cols.start  # of the first row and the first column
    behind = mask.left is not None and lag + num_rows - 1 > mask.left
    ahead = mask.right is not None and num_cols - 1 - lag > mask.right
    if not (behind or ahead):
        return None
    lags = torch.arange(lag, lag + num_rows, device=device).unsqueeze(1)
    lags = lags - torch.arange(num_cols, device=device)
    result = torch.zeros_like(lags, dtype=torch.bool)
    if mask.left is not None:
        result |= lags > mask.left
    if mask.right is not None:
        result |= -lags > mask.right
    return result
