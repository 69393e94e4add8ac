"""Merges partials on GPUs, in one launch and one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from dtensor_ring.compute.memory import Accumulation, Partial, Region

# Rows of a program, which holds 16 KiB of float32 for a head dim of 128.
BLOCK_ROWS = 32

NOTHING: Region = (slice(0), slice(0), slice(0))
NO_POINTERS = (), (), 0, (), (), None, ()


def accumulate_sums(*sums: Accumulation) -> None:
    """Implement `dtensor_ring.compute.merge.accumulate_sums` for one sum, or for two without lse.

    Two sums have the same batch, heads and rows. The launch reads and writes each number once.
    """
    one, other = sums[0], sums[-1]
    batch, heads, rows, _ = one.target.shape
    if not one.target.shape[:3].numel():
        return
    assert one.target.shape[:3] == other.target.shape[:3], "one grid serves both"
    stride = one.target.stride()
    with torch.cuda.device_of(one.target):
        _accumulate_sums[(triton.cdiv(rows, BLOCK_ROWS) * heads * batch, len(sums))](
            *(*_pointers(one), *(NO_POINTERS if one is other else _pointers(other)), heads, rows),
            BLOCK_ROWS=tl.constexpr(BLOCK_ROWS),
            BLOCK_DIMS=tl.constexpr(
                max(1, *(triton.next_power_of_2(x.target.shape[3]) for x in sums))
            ),
            # Neighbouring programs have neighbouring memory.
            HEADS_FIRST=tl.constexpr(stride[1] < stride[2]),
            IS_PAIR=tl.constexpr(one is not other),
            IS_WIDE=tl.constexpr(one.wide == torch.float64),
            # Triton's own default, which it warns about where it is not given.
            enable_fp_fusion=True,  # pyrefly: ignore[unexpected-keyword]
        )


def _pointers(one: Accumulation) -> tuple[Any, ...]:
    """Return the arguments of the kernel for one sum: tensors, strides, lse and sizes."""
    # Triton compiles for each number of partials, so pad it to a power of two with empty partials.
    num_parts = triton.next_power_of_2(max(1, len(one.partials)))
    partials = [*one.partials, *[Partial(NOTHING, one.target, one.lse)] * num_parts][:num_parts]
    tensors = [one.target, *(partial.x for partial in partials)]
    head_dim = one.target.shape[3]
    assert all(x.stride(3) == 1 or head_dim == 1 for x in tensors), "last strides are 1"
    lses = () if one.lse is None else (one.lse, *(partial.lse for partial in partials))
    spans = [partial.spans(one.target.shape) for partial in partials]
    return (
        tuple(tensors),
        tuple(x.stride()[:3] for x in tensors),
        head_dim,
        lses,
        tuple(_plain(x.stride()) for x in lses if x is not None),
        one.sinks,
        tuple(_plain((*batches, *rows)) for batches, rows in spans),
    )


def _plain(numbers: Sequence[int]) -> tuple[int, ...]:
    """Encode numbers that change between batches, so Triton does not recompile for them."""
    # Triton specializes on 1 and multiples of 16 in a tuple; `4 * n + 2` is neither.
    return tuple(number << 2 | 2 for number in numbers)


@triton.jit(do_not_specialize=["num_rows"])
def _accumulate_sums(
    tensors,
    strides,
    head_dim,
    lses,
    lse_strides,
    sinks,
    spans,
    other_tensors,
    other_strides,
    other_head_dim,
    other_lses,
    other_lse_strides,
    other_sinks,
    other_spans,
    num_heads,
    num_rows,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    IS_PAIR: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Compute a block of rows of one head and batch row, of the first sum or of the other."""
    if IS_PAIR:  # noqa: SIM102 - known when this is compiled
        if tl.program_id(1) == 1:
            _put(
                *(other_tensors, other_strides, other_head_dim, other_lses, other_lse_strides),
                *(other_sinks, other_spans, num_heads, num_rows),
                *(BLOCK_ROWS, BLOCK_DIMS, HEADS_FIRST, IS_WIDE),
            )
            return
    _put(
        *(tensors, strides, head_dim, lses, lse_strides, sinks, spans, num_heads, num_rows),
        *(BLOCK_ROWS, BLOCK_DIMS, HEADS_FIRST, IS_WIDE),
    )


@triton.jit
def _put(
    tensors,
    strides,
    head_dim,
    lses,
    lse_strides,
    sinks,
    spans,
    num_heads,
    num_rows,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Compute a block of rows of one sum. `tensors` and `lses` begin with those written to."""
    # pyrefly: ignore[bad-assignment]
    wide: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    program = tl.program_id(0)
    if HEADS_FIRST:
        head, block = program % num_heads, program // num_heads % num_blocks
    else:
        head, block = program // num_blocks % num_heads, program % num_blocks
    # 64 bits: offsets into long sequences exceed 2**31.
    batch, head = (program // (num_heads * num_blocks)).to(tl.int64), head.to(tl.int64)
    rows = block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIMS)
    is_row, is_dim = rows < num_rows, (dims < head_dim)[None, :]

    base, total, is_seen = rows, rows, is_row
    if len(lses) > 0:
        base, total, is_seen = _total(lses, lse_strides, sinks, spans, batch, head, rows, wide)

    result = tl.zeros((BLOCK_ROWS, BLOCK_DIMS), wide)
    for i in tl.static_range(len(spans)):
        at, is_here = _rows_of(strides[i + 1], spans[i], batch, head, rows)
        mask = is_here[:, None] & is_dim
        x = tl.load(tensors[i + 1] + at[:, None] + dims[None, :], mask=mask, other=0.0).to(wide)
        if len(lses) > 0:
            # The weight is 0 if no partial has seen the row. Without a subtraction, inf stays inf.
            lse = _lse(lses[i + 1], lse_strides[i + 1], spans[i], batch, head, rows)
            x *= (tl.exp(lse - base) / total)[:, None]
        result += x
    tl.debug_barrier()  # in place: all warps must have read before one of them writes
    if len(lses) > 0:
        of_batch, of_head, of_row = lse_strides[0]
        at = batch * (of_batch >> 2) + head * (of_head >> 2) + rows * (of_row >> 2)
        merged = tl.where(is_seen, base + tl.log(total), -float("inf"))
        tl.store(lses[0] + at, merged, mask=is_row)
    at = (
        batch * strides[0][0] + head * strides[0][1] + rows[:, None] * strides[0][2] + dims[None, :]
    )
    tl.store(tensors[0] + at, result.to(tensors[0].dtype.element_ty), mask=is_row[:, None] & is_dim)


@triton.jit
def _total(lses, lse_strides, sinks, spans, batch, head, rows, wide: tl.constexpr):
    """Return each row's largest lse, its sum of `exp(lse - largest)`, and whether it is seen."""
    largest = tl.zeros(rows.shape, wide) - float("inf")
    if sinks is not None:
        largest = tl.maximum(largest, tl.load(sinks + head).to(wide))
    for i in tl.static_range(len(spans)):
        lse = _lse(lses[i + 1], lse_strides[i + 1], spans[i], batch, head, rows)
        # A NaN must reach the result; a plain maximum would drop it.
        largest = tl.maximum(largest, lse, propagate_nan=tl.PropagateNan.ALL)
    is_seen = largest != -float("inf")
    # -inf - -inf would be NaN.
    base = tl.where(is_seen, largest, 0.0)
    total = tl.where(is_seen, 0.0, 1.0).to(wide)
    if sinks is not None:
        total += tl.exp(tl.load(sinks + head).to(wide) - base)
    for i in tl.static_range(len(spans)):
        total += tl.exp(_lse(lses[i + 1], lse_strides[i + 1], spans[i], batch, head, rows) - base)
    return base, total, is_seen


@triton.jit
def _lse(lse, strides, span, batch, head, rows):
    """Load the lse of a partial; it is -inf where the partial has no rows."""
    strides = strides[0] >> 2, strides[1] >> 2, strides[2] >> 2
    at, is_here = _rows_of(strides, span, batch, head, rows)
    return tl.load(lse + at, mask=is_here, other=-float("inf"))


@triton.jit
def _rows_of(strides, span, batch, head, rows):
    """Return the offsets of rows in a partial, and whether the partial has them."""
    first_batch, end_batch = span[0] >> 2, span[1] >> 2
    first_row, end_row = span[2] >> 2, span[3] >> 2
    end_row = tl.where(batch < first_batch, 0, tl.where(batch < end_batch, end_row, 0))
    at = (batch - first_batch) * strides[0] + head * strides[1] + (rows - first_row) * strides[2]
    return at, (rows >= first_row) & (rows < end_row)
