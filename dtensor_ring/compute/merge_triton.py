"""The merge of two partial results in one pass over memory, for GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 32
"""Rows of a program: with head dims of 128 it holds 16 KiB of float32."""


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, target: Tensor) -> None:
    """`dtensor_ring.compute.merge.merge_` of `(B, N, L, H)` tensors, whose last stride is 1.

    `target` may be `out`. Reads and writes each number once, where the other takes seven passes.
    """
    batch, heads, rows, head_dim = out.shape
    if not lse.numel():
        return
    grid = (triton.cdiv(rows, BLOCK_ROWS) * heads * batch,)
    tensors = out, block_out, target
    assert all(x.stride(3) == 1 or head_dim == 1 for x in tensors), "last strides are 1"
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    strides += [*lse.stride(), *block_lse.stride()]
    with torch.cuda.device_of(out):
        _merge[grid](
            *(out, block_out, target, lse, block_lse, heads, rows, head_dim, *strides),
            BLOCK_ROWS=tl.constexpr(BLOCK_ROWS),
            BLOCK_DIMS=tl.constexpr(max(1, triton.next_power_of_2(head_dim))),
        )


@triton.jit
def _merge(
    out,
    block_out,
    target,
    lse,
    block_lse,
    num_heads,
    num_rows,
    head_dim,
    out_batch,
    out_head,
    out_row,
    block_batch,
    block_head,
    block_row,
    target_batch,
    target_head,
    target_row,
    lse_batch,
    lse_head,
    lse_row,
    block_lse_batch,
    block_lse_head,
    block_lse_row,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
):
    """One block of rows of one head of one batch row; the numbers after the shape are strides."""
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    block, sequence = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    # 64 bits: offsets into long sequences exceed 2**31.
    head, batch = (sequence % num_heads).to(tl.int64), (sequence // num_heads).to(tl.int64)
    rows = block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIMS)
    is_row = rows < num_rows
    is_entry = is_row[:, None] & (dims < head_dim)[None, :]

    lse += batch * lse_batch + head * lse_head + rows * lse_row
    block_lse += batch * block_lse_batch + head * block_lse_head + rows * block_lse_row
    ours = tl.load(lse, mask=is_row, other=-float("inf"))
    theirs = tl.load(block_lse, mask=is_row, other=-float("inf"))
    # A NaN must show in the result: a plain maximum would take the other side.
    largest = tl.maximum(ours, theirs, propagate_nan=tl.PropagateNan.ALL)
    unseen = largest == -float("inf")
    # -inf - -inf would be NaN.
    base = tl.where(unseen, 0.0, largest)
    our_sum, block_sum = tl.exp(ours - base), tl.exp(theirs - base)
    total = tl.where(unseen, 1.0, our_sum + block_sum)
    kept, weight = (our_sum / total)[:, None], (block_sum / total)[:, None]  # 0 if unseen

    out += batch * out_batch + head * out_head + rows[:, None] * out_row + dims[None, :]
    block_out += batch * block_batch + head * block_head + rows[:, None] * block_row + dims[None, :]
    target += batch * target_batch + head * target_head + rows[:, None] * target_row + dims[None, :]
    before = tl.load(out, mask=is_entry, other=0.0).to(weight.dtype)
    after = tl.load(block_out, mask=is_entry, other=0.0).to(weight.dtype)
    # No difference: an infinite output stays infinite.
    merged = before * kept + after * weight
    tl.debug_barrier()  # all warps have read what one of them overwrites
    tl.store(lse, tl.where(unseen, largest, base + tl.log(total)), mask=is_row)
    tl.store(target, merged.to(target.dtype.element_ty), mask=is_entry)
