"""Cuts the band of a tile into blocks, for kernels that have no windows."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from dtensor_ring.planning.mask import Mask

# A rectangle of rows and columns.
Block = tuple[slice, slice]


def row_blocks(num_rows: int, num_cols: int, mask: Mask, block_rows: int) -> list[Block]:
    """Return blocks of rows, each with the range of columns that its rows see."""
    blocks = []
    for start in range(0, num_rows, block_rows):
        end = min(num_rows, start + block_rows)
        # The first row reaches furthest left, the last one furthest right.
        first = 0 if mask.left is None else max(0, start - mask.left)
        last = num_cols if mask.right is None else min(num_cols, end + mask.right)
        blocks.append((slice(start, end), slice(first, last)))
    return blocks


def col_blocks(num_rows: int, num_cols: int, mask: Mask, block_cols: int) -> list[Block]:
    """Return blocks of columns, each with the range of rows that see one of them."""
    # Transpose the band: column j sees row i under the mirrored mask.
    seen_from = Mask(mask.right, mask.left)
    blocks = row_blocks(num_cols, num_rows, seen_from, block_cols)
    return [(rows, cols) for cols, rows in blocks]


class Bias:
    """Additive masks for the blocks of a band: 0 or -inf, views of one small matrix.

    An entry depends only on its lag, which is row minus column. So the matrix is as large as the
    largest block, extended by the difference of the lags at which blocks start.

    Args:
        blocks: all blocks of the band.
        mask: the band.
        like: a tensor with the dtype and the device of the scores.
    """

    def __init__(self, blocks: list[Block], mask: Mask, like: Tensor) -> None:
        lags = [_lag(block) for block in blocks]
        shapes = {lag: _extent(blocks, lag) for lag in (min(lags), max(lags))}
        self._mask = mask
        # A block that starts at another lag is a view further down, or further to the right.
        self._lag = min(shapes, key=lambda lag: prod(shapes[lag]))  # of the matrix's first entry
        self._matrix = like.new_zeros(shapes[self._lag])
        # Entry (i, j) has the lag self._lag + i - j; both triangles are counted from there.
        if mask.right is not None:
            ahead = torch.full_like(self._matrix, -torch.inf)
            self._matrix += ahead.triu_(self._lag + mask.right + 1)
        if mask.left is not None:
            behind = torch.full_like(self._matrix, -torch.inf)
            self._matrix += behind.tril_(self._lag - mask.left - 1)

    def of(self, block: Block) -> Tensor | None:
        """Return a block's bias: 0 where a row sees a column, else -inf; `None` if it is all 0."""
        # Kernels are faster without a bias.
        if not _hides(block, self._mask):
            return None
        (rows, cols), lag = block, _lag(block)
        # A step down raises the lag by one, a step to the right lowers it.
        down, across = max(0, lag - self._lag), max(0, self._lag - lag)
        return self._matrix[down:, across:][: rows.stop - rows.start, : cols.stop - cols.start]


def hidden(block: Block, mask: Mask, device: torch.device) -> Tensor | None:
    """Return a boolean `(R, C)`, true where a row does not see a column; `None` if all false."""
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
    """Return the first row minus the first column."""
    return block[0].start - block[1].start


def _extent(blocks: list[Block], lag: int) -> tuple[int, int]:
    """Return the shape of a matrix that holds all blocks and whose first entry has this lag."""
    num_rows = max(
        rows.stop - rows.start + max(0, _lag((rows, cols)) - lag) for rows, cols in blocks
    )
    num_cols = max(
        cols.stop - cols.start + max(0, lag - _lag((rows, cols))) for rows, cols in blocks
    )
    return num_rows, num_cols


def _hides(block: Block, mask: Mask) -> bool:
    """Return whether some row of the block does not see some column of it."""
    rows, cols = block
    # Check the corners: lower left has the largest lag, upper right the smallest.
    behind = mask.left is not None and rows.stop - 1 - cols.start > mask.left
    ahead = mask.right is not None and cols.stop - 1 - rows.start > mask.right
    return behind or ahead
