"""A band of a tile by blocks, for kernels that have no windows."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from dtensor_ring.mask import Mask

Block = tuple[slice, slice]
"""A rectangle of rows and columns."""


def row_blocks(num_rows: int, num_cols: int, mask: Mask, block_rows: int) -> list[Block]:
    """Blocks of rows, and the columns from the first to the last that any row of them sees."""
    blocks = []
    for start in range(0, num_rows, block_rows):
        end = min(num_rows, start + block_rows)
        first = 0 if mask.left is None else max(0, start - mask.left)
        last = num_cols if mask.right is None else min(num_cols, end + mask.right)
        blocks.append((slice(start, end), slice(first, last)))
    return blocks


def col_blocks(num_rows: int, num_cols: int, mask: Mask, block_cols: int) -> list[Block]:
    """Blocks of columns, and the rows from the first to the last that see any column of them."""
    seen_from = Mask(mask.right, mask.left)
    blocks = row_blocks(num_cols, num_rows, seen_from, block_cols)
    return [(rows, cols) for cols, rows in blocks]


class Bias:
    """What to add to the scores of the blocks of a band: each takes its part of one matrix.

    The band looks alike all along its diagonal, so the matrix needs to be as high, or as wide, as
    the largest block only.
    """

    def __init__(self, blocks: list[Block], mask: Mask, like: Tensor) -> None:
        lags = [_lag(block) for block in blocks]
        shapes = {lag: _extent(blocks, lag) for lag in (min(lags), max(lags))}
        self._mask = mask
        self._lag = min(shapes, key=lambda lag: prod(shapes[lag]))  # of the matrix's first entry
        self._matrix = like.new_zeros(shapes[self._lag])
        if mask.right is not None:
            ahead = torch.full_like(self._matrix, -torch.inf)
            self._matrix += ahead.triu_(self._lag + mask.right + 1)
        if mask.left is not None:
            behind = torch.full_like(self._matrix, -torch.inf)
            self._matrix += behind.tril_(self._lag - mask.left - 1)

    def of(self, block: Block) -> Tensor | None:
        """The part for a block: 0 where a row sees a column, else -inf; `None` if all see all."""
        if not _hides(block, self._mask):
            return None
        (rows, cols), lag = block, _lag(block)
        down, across = max(0, lag - self._lag), max(0, self._lag - lag)
        return self._matrix[down:, across:][: rows.stop - rows.start, : cols.stop - cols.start]


def hidden(block: Block, mask: Mask, device: torch.device) -> Tensor | None:
    """Which columns a row of the block does not see, a boolean `(R, C)`; `None` if all see all."""
    if not _hides(block, mask):
        return None
    rows, cols = block
    lags = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    lags = lags - torch.arange(cols.start, cols.stop, device=device)
    result = torch.zeros_like(lags, dtype=torch.bool)
    if mask.left is not None:
        result |= lags > mask.left
    if mask.right is not None:
        result |= -lags > mask.right
    return result


def _lag(block: Block) -> int:
    """Of the first row and the first column."""
    return block[0].start - block[1].start


def _extent(blocks: list[Block], lag: int) -> tuple[int, int]:
    """Rows and columns of a matrix that holds all blocks, if that is the lag of its first entry."""
    num_rows = max(
        rows.stop - rows.start + max(0, _lag((rows, cols)) - lag) for rows, cols in blocks
    )
    num_cols = max(
        cols.stop - cols.start + max(0, lag - _lag((rows, cols))) for rows, cols in blocks
    )
    return num_rows, num_cols


def _hides(block: Block, mask: Mask) -> bool:
    """Whether some row of the block does not see some column of it."""
    rows, cols = block
    behind = mask.left is not None and rows.stop - 1 - cols.start > mask.left
    ahead = mask.right is not None and cols.stop - 1 - rows.start > mask.right
    return behind or ahead
