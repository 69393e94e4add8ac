"""Adapters of kernels that lack something: windows by blocks, shared key heads, lse's gradient."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import (
    Gradients,
    Kernel,
    Launch,
    Problem,
    Result,
    Saved,
    Scores,
)
from dtensor_ring.compute.memory import empty, order_of
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


def fold_heads(query: Tensor, num_kv_heads: int) -> Tensor:
    """Return `(B, N, R, H)` as `(B, Nkv, N / Nkv * R, H)`: heads of a group become rows of one."""
    # A view of head-major memory. Other orders are copied if groups have several heads and rows.
    batch, num_heads, rows, head_dim = query.shape
    return query.reshape(batch, num_kv_heads, num_heads // num_kv_heads * rows, head_dim)


def unfold_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return `(B, Nkv, N / Nkv * R, ...)` as `(B, N, R, ...)`."""
    batch, num_kv_heads, rows, *head_dim = x.shape
    return x.reshape((batch, num_heads, rows * num_kv_heads // num_heads, *head_dim))


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


# The number of extra columns. Head dims that are multiples of 8 remain multiples of 8.
COLUMNS = 8

# The number of 16-bit partials that hold one float32.
PARTS = 3

# Bounds of the unit of a row: powers of two that every dtype holds.
SMALLEST, LARGEST = 2.0**-14, 2.0**15


class WidenedKernel(Kernel):
    """Adds the gradient of lse to a kernel that does not support it, by extra columns.

    Note [Gradient of lse in columns]: the gradient of a score is `p * (grad_out.v - delta +
    grad_lse)`, where kernels compute `delta = sum(grad_out * out)`. So `out` and `grad_out` get
    extra columns whose products add up to `-grad_lse`. The extra columns of the value are 0, which
    does not change `grad_out.v`. If query and value have one head dim, query and key also get
    columns of 0, which do not change the scores. The gradients of all extra columns are dropped.
    Kernels sum `delta` in float32 or wider. The products are as exact: `grad_lse` is divided by a
    unit for each row, and stored as three numbers of 16 bits.

    Args:
        kernel: a kernel whose backward follows the formula of `Kernel`.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.wrapped = kernel
        self.name, self.has_segments = kernel.name, kernel.has_segments  # type: ignore[misc]
        self.has_intervals = kernel.has_intervals  # type: ignore[misc]
        self.has_dropout, self.has_bias = kernel.has_dropout, kernel.has_bias  # type: ignore[misc]
        self.bitwise_by_block = kernel.bitwise_by_block  # type: ignore[misc]

    def missing(self) -> str | None:
        return self.wrapped.missing()

    def supports(self, problem: Problem) -> str | None:
        narrow = replace(problem, differentiable_lse=False)
        # The wrapped kernel never sees the gradient of lse, but it has to serve wider tensors.
        if reason := self.wrapped.supports(narrow):
            return reason
        head_dim, value_head_dim = problem.head_dim, problem.value_head_dim
        head_dim += COLUMNS if head_dim == value_head_dim else 0
        wide = replace(narrow, head_dim=head_dim, value_head_dim=value_head_dim + COLUMNS)
        reason = self.wrapped.supports(wide)
        return reason and f"{reason}, with the {COLUMNS} columns that the gradient of lse takes"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        return self.wrapped.forward(q, k, v, launch, scores)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        head_dim, value_head_dim = q.shape[-1], v.shape[-1]
        if head_dim == value_head_dim:
            q, k = _widened(q), _widened(k)
        wide = _with_columns(saved, is_tile=launch.segments is None)
        dq, dk, dv = self.wrapped.backward(wide, q, k, _widened(v), launch, scores)
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_head_dim]


def _widened(x: Tensor) -> Tensor:
    """Return a copy with extra columns of 0, in the same memory order."""
    head_dim = x.shape[-1]
    wide = empty(x, (*x.shape[:-1], head_dim + COLUMNS), order_of(x))
    wide[..., :head_dim] = x
    wide[..., head_dim:] = 0
    return wide


def _with_columns(saved: Saved, is_tile: bool) -> Saved:
    """Widen `out` and `grad_out`, so each row's sum of products is smaller by `grad_lse`."""
    assert saved.grad_lse is not None, "the kernel itself serves without"
    out, grad_out = _widened(saved.out), _widened(saved.grad_out)
    # With segments, lse is `(N, T)`, but the other tensors are token-major.
    rest = saved.grad_lse if is_tile else saved.grad_lse.transpose(0, 1)
    # float16 only covers 6e-8 to 65504, so scale each row to about 1.
    unit = rest.abs().clamp(SMALLEST, LARGEST).to(out.dtype)
    rest = rest / unit
    for column in range(saved.out.shape[-1], saved.out.shape[-1] + PARTS):
        part = rest.to(out.dtype)
        out[..., column], grad_out[..., column] = -part, unit
        rest = rest - part
    return Saved(grad_out, out, saved.lse)
