"""Merges partials on GPUs, in one launch and one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from dtensor_ring.compute.memory import Accumulation, Partial, Region

Strides = tuple[int, ...]
NOTHING: Region = (slice(0), slice(0), slice(0))
NO_POINTERS = (), (), tl.constexpr(0), (), (), None, ()


def accumulate_sums(*sums: Accumulation) -> None:
    """Implement `dtensor_ring.compute.merge.accumulate_sums` for one sum, or for two without lse.

    Two sums have the same batch, heads and rows. The launch reads and writes each number once.
    """
    one, *others = (_padded(x) for x in sums)
    batch, heads, rows, _ = one.target.shape
    if not one.target.shape[:3].numel():
        return
    assert all(x.target.shape[:3] == one.target.shape[:3] for x in others), "one grid serves both"
    block_rows, block_dims = _block([one, *others])
    strides = [[x.stride()[:3] for x in _tensors(each)] for each in (one, *others)]
    unit = _unit([one, *others], strides)
    other = _pointers(others[0], strides[1], unit) if others else NO_POINTERS
    arguments: tuple[Any, ...] = (*_pointers(one, strides[0], unit), *other, heads, rows)
    stride = strides[0][0]
    with torch.cuda.device_of(one.target):
        _accumulate_sums[(triton.cdiv(rows, block_rows) * heads * batch, len(sums))](
            *arguments,
            BLOCK_ROWS=tl.constexpr(block_rows),
            BLOCK_DIMS=tl.constexpr(block_dims),
            UNIT=tl.constexpr(unit),
            # Neighbouring programs have neighbouring memory.
            HEADS_FIRST=tl.constexpr(stride[1] < stride[2]),
            IS_PAIR=tl.constexpr(bool(others)),
            IS_WIDE=tl.constexpr(one.wide == torch.float64),
            # Triton's own default, which it warns about where it is not given.
            enable_fp_fusion=True,  # pyrefly: ignore[unexpected-keyword]
        )


def _padded(one: Accumulation) -> Accumulation:
    """Return the sum with empty partials added, so that their number is a power of two."""
    # Triton compiles for each number of partials.
    num_missing = triton.next_power_of_2(max(1, len(one.partials))) - len(one.partials)
    nothing = Partial(NOTHING, one.target, one.lse)
    return replace(one, partials=[*one.partials, *[nothing] * num_missing])


def _tensors(one: Accumulation) -> tuple[torch.Tensor, ...]:
    """Return the target and the partials."""
    return one.target, *(partial.x for partial in one.partials)


# The most rows of a program, and the most numbers of its result: 32 of each of its 128 threads.
MAX_ROWS = 32
MAX_NUMBERS = 4096

# Registers that the partials and the result may fill, in bytes: 128 of 255 in each thread. The
# others hold offsets and weights. With more, too few threads fit a multiprocessor: 8 partials are
# merged at 3.1 TB/s on an H200, and at 3.7 TB/s within this bound.
REGISTER_BYTES = 64 * 1024


def _block(sums: Sequence[Accumulation]) -> tuple[int, int]:
    """Return the rows and head dim of a program, powers of two. Registers bound the rows."""
    dims = max([1, *(triton.next_power_of_2(one.target.shape[3]) for one in sums)])
    # A thread loads from all partials before it adds the first.
    each = max(one.wide.itemsize + sum(x.x.itemsize for x in one.partials) for one in sums)
    rows = max(1, min(MAX_ROWS, MAX_NUMBERS // dims, REGISTER_BYTES // (dims * each)))
    return 1 << rows.bit_length() - 1, dims


# The most numbers that a thread loads at once: 16 bytes of a 16-bit dtype.
MAX_UNIT = 8


def _unit(sums: Sequence[Accumulation], strides: Sequence[Sequence[Strides]]) -> int:
    """Return how many numbers divide all head dims and strides: 1, 2, 4 or 8."""
    head_dims = [one.target.shape[3] for one in sums]
    return gcd(MAX_UNIT, *head_dims, *chain.from_iterable(chain.from_iterable(strides)))


def _pointers(one: Accumulation, strides: Sequence[Strides], unit: int) -> tuple[Any, ...]:
    """Return the arguments of the kernel for one sum: tensors, strides, lse and sizes."""
    tensors, head_dim = _tensors(one), one.target.shape[3]
    assert all(x.stride(3) == 1 or head_dim == 1 for x in tensors), "last strides are 1"
    lses = () if one.lse is None else (one.lse, *(partial.lse for partial in one.partials))
    spans = [partial.spans(one.target.shape) for partial in one.partials]
    return (
        tensors,
        # In units, so that the compiler knows the alignment of rows without their strides.
        tuple(plain([x // unit for x in stride]) for stride in strides),
        tl.constexpr(head_dim),
        lses,
        tuple(plain(x.stride()) for x in lses if x is not None),
        one.sinks,
        tuple(plain((*batches, *rows)) for batches, rows in spans),
    )


def plain(numbers: Sequence[int]) -> tuple[int, ...]:
    """Encode numbers that change between batches, so Triton does not recompile for them."""
    # Triton specializes on 1 and multiples of 16 in a tuple; `4 * n + 2` is neither.
    return tuple(number << 2 | 2 for number in numbers)


@triton.jit(do_not_specialize=["num_rows"])
def _accumulate_sums(
    tensors,
    strides,
    head_dim: tl.constexpr,
    lses,
    lse_strides,
    sinks,
    spans,
    other_tensors,
    other_strides,
    other_head_dim: tl.constexpr,
    other_lses,
    other_lse_strides,
    other_sinks,
    other_spans,
    num_heads,
    num_rows,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    IS_PAIR: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Compute a block of rows of one head and batch row, of the first sum or of the other."""
    if IS_PAIR:  # noqa: SIM102 - known when this is compiled
        if tl.program_id(1) == 1:
            _put(
                other_tensors,
                other_strides,
                other_head_dim,
                other_lses,
                other_lse_strides,
                other_sinks,
                other_spans,
                num_heads,
                num_rows,
                BLOCK_ROWS,
                BLOCK_DIMS,
                UNIT,
                HEADS_FIRST,
                IS_WIDE,
            )
            return
    _put(
        tensors,
        strides,
        head_dim,
        lses,
        lse_strides,
        sinks,
        spans,
        num_heads,
        num_rows,
        BLOCK_ROWS,
        BLOCK_DIMS,
        UNIT,
        HEADS_FIRST,
        IS_WIDE,
    )


@triton.jit
def _put(
    tensors,
    strides,
    head_dim: tl.constexpr,
    lses,
    lse_strides,
    sinks,
    spans,
    num_heads,
    num_rows,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    UNIT: tl.constexpr,
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
        at = at[:, None] * UNIT + dims[None, :]
        x = tl.load(tensors[i + 1] + at, mask=mask, other=0.0).to(wide)
        if len(lses) > 0:
            # The weight is 0 if no partial has seen the row. Without a subtraction, inf stays inf.
            lse = _lse(lses[i + 1], lse_strides[i + 1], spans[i], batch, head, rows)
            x *= (tl.exp(lse - base) / total)[:, None]
        result += x
    tl.debug_barrier()  # in place: all warps must have read before one of them writes
    if len(lses) > 0:
        merged = tl.where(is_seen, base + tl.log(total), -float("inf"))
        tl.store(lses[0] + offset_of(lse_strides[0], batch, head, rows), merged, mask=is_row)
    at = offset_of(strides[0], batch, head, rows)[:, None] * UNIT + dims[None, :]
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
    at, is_here = _rows_of(strides, span, batch, head, rows)
    return tl.load(lse + at, mask=is_here, other=-float("inf"))


@triton.jit
def _rows_of(strides, span, batch, head, rows):
    """Return the offsets of rows in a partial, and whether the partial has them."""
    first_batch, end_batch = span[0] >> 2, span[1] >> 2
    first_row, end_row = span[2] >> 2, span[3] >> 2
    end_row = tl.where(batch < first_batch, 0, tl.where(batch < end_batch, end_row, 0))
    at = offset_of(strides, batch - first_batch, head, rows - first_row)
    return at, (rows >= first_row) & (rows < end_row)


@triton.jit
def offset_of(strides, batch, head, rows):
    """Return the offsets of rows, in the unit of the strides."""
    return batch * (strides[0] >> 2) + head * (strides[1] >> 2) + rows * (strides[2] >> 2)
