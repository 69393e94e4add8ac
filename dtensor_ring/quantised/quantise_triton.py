"""Keys and values to eight bits and back on GPUs: one launch and one pass over memory each.

What is computed is defined by `dtensor_ring/quantised/block_scales.py`. Sums, products and
quotients are the same here, in the same order and never fused, so bits are those of CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_ring.compute.merge_triton import offset_of, plain

# The most numbers of a program that quantises a block: 64 of each of its 512 threads.
MAX_NUMBERS = 1 << 15

# The most numbers and tokens of a program that dequantises, whose tokens need not be a block.
MAX_TILE, MAX_TOKENS = 8192, 64

# Numbers of a warp, as long as there are warps. With 64 numbers a thread in place of 32, an H200
# took 0.7 to 1.0 of the time where threads exchange numbers, and 1.1 to 1.3 where they do not:
# values that are dequantised.
NUMBERS_OF_WARP, OF_WARP_WITHOUT_EXCHANGE, MAX_WARPS = 2048, 1024, 16

# The most numbers that a thread loads or stores at once: 16 bytes of a dtype of 8 bits.
MAX_UNIT = 16

EightBits = tuple[Tensor, Tensor, Tensor | None]
"""Data, scales and means of a `Quantised`; keys have no means."""


def fits(block_size: int, head_dim: int) -> bool:
    """Return whether the registers of a program hold a block, so that each number is read once.

    Both sizes are rounded up to powers of two. Blocks of 64 tokens may have a head dim of 512.
    """
    return _power(block_size) * _power(head_dim) <= MAX_NUMBERS


def quantise(x: Tensor, into: EightBits, largest: float, block_size: int) -> None:
    """Write keys or values in eight bits, into memory of any strides: packed as it travels.

    Args:
        x: `(B, N, L, H)`.
        into: data, scales and means.
        largest: the largest number of the dtype of the data.
        block_size: tokens of a block.
    """
    x = x if x.stride(3) == 1 else x.contiguous()
    warp = NUMBERS_OF_WARP
    _launch(_quantise, x, into, block_size, block_size, warp, LARGEST=tl.constexpr(largest))


def dequantise(source: EightBits, out: Tensor, block_size: int) -> None:
    """Write keys or values in the user's basis.

    Args:
        source: data, scales and means.
        out: `(B, N, L, H)` in any floating dtype and of any strides, overwritten.
        block_size: tokens of a block.
    """
    rows = max(1, min(MAX_TOKENS, MAX_TILE // _power(out.shape[3])))
    warp = NUMBERS_OF_WARP if source[2] is None else OF_WARP_WITHOUT_EXCHANGE
    _launch(_dequantise, out, source, block_size, rows, warp)


def _power(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _launch(
    kernel: Any,
    wide: Tensor,
    eight_bits: EightBits,
    block_size: int,
    num_rows: int,
    numbers_of_warp: int,
    **how: Any,
) -> None:
    """Launch a program for each so many rows of a head."""
    _, heads, num_tokens, head_dim = wide.shape
    if not wide.numel():
        return
    tensors = [x for x in (wide, *eight_bits) if x is not None]
    assert all(x.stride(3) == 1 or x.shape[3] == 1 for x in tensors), "last strides are 1"
    unit, strides = _in_units(tensors, head_dim)
    num_programs = wide.shape[0] * heads * -(-num_tokens // num_rows)
    block = _power(num_rows), _power(head_dim)
    with torch.cuda.device_of(wide):
        kernel[(num_programs,)](
            *(wide, *eight_bits, strides, heads, num_tokens),
            HEAD_DIM=tl.constexpr(head_dim),
            BLOCK_SIZE=tl.constexpr(block_size),
            BLOCK_ROWS=tl.constexpr(block[0]),
            BLOCK_DIMS=tl.constexpr(block[1]),
            UNIT=tl.constexpr(unit),
            **how,
            # A product that is fused with a sum is not rounded, so bits would differ.
            enable_fp_fusion=False,
            num_warps=max(1, min(MAX_WARPS, block[0] * block[1] // numbers_of_warp)),
        )


def _in_units(tensors: Sequence[Tensor], head_dim: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return how many numbers divide the head dim and all strides, and the strides in this unit.

    So the compiler knows how rows are aligned without their strides. Scales of keys have no
    channels, and strides of their own.
    """
    strides = [
        [0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
        for x in tensors
    ]
    has_channels = [x.shape[3] == head_dim for x in tensors]
    aligned = [of for of, has in zip(strides, has_channels, strict=True) if has]
    unit = gcd(MAX_UNIT, head_dim, *chain.from_iterable(aligned))
    units = [unit if has else 1 for has in has_channels]
    each = zip(strides, units, strict=True)
    return unit, tuple(plain([x // of_tensor for x in of]) for of, of_tensor in each)


@triton.jit(do_not_specialize=["num_tokens"])
def _quantise(
    x,
    data,
    scales,
    means,
    strides,
    num_heads,
    num_tokens,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    UNIT: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Quantise a block of tokens of one head and batch row."""
    batch, head, block = _place(num_heads, tl.cdiv(num_tokens, BLOCK_SIZE))
    row, dims = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIMS)[None, :]
    rows, is_dim = block * BLOCK_SIZE + row, dims < HEAD_DIM
    is_row = ((row < BLOCK_SIZE) & (rows < num_tokens))[:, None]
    at = offset_of(strides[0], batch, head, rows)[:, None] * UNIT + dims
    numbers = tl.load(x + at, mask=is_row & is_dim, other=0.0).to(tl.float32)
    at = offset_of(strides[2], batch, head, block)
    if means is None:
        numbers = _rotated(numbers * _signs(dims), dims, HEAD_DIM, BLOCK_ROWS, BLOCK_DIMS)
        scale = _positive(_over(_largest(_largest(numbers, 1), 0), LARGEST))
        tl.store(scales + at + tl.arange(0, 1)[None, :], scale)
    else:
        count = tl.minimum(num_tokens - block * BLOCK_SIZE, BLOCK_SIZE)
        mean = tl.sum(numbers.to(tl.float64), 0, keep_dims=True) * (1.0 / count.to(tl.float64))
        mean = mean.to(tl.float32).to(tl.bfloat16)
        numbers = tl.where(is_row, numbers - mean.to(tl.float32), 0.0)
        scale = _over(_largest(numbers, 0), LARGEST).to(tl.bfloat16)
        scale = _positive(scale.to(tl.float32))
        tl.store(scales + at * UNIT + dims, scale.to(tl.bfloat16), mask=is_dim)
        at = offset_of(strides[3], batch, head, block) * UNIT + dims
        tl.store(means + at, mean, mask=is_dim)
    rounded = _rounded(_over(numbers, scale), LARGEST, data.dtype.element_ty)
    at = offset_of(strides[1], batch, head, rows)[:, None] * UNIT + dims
    tl.store(data + at, rounded, mask=is_row & is_dim)


@triton.jit(do_not_specialize=["num_tokens"])
def _dequantise(
    out,
    data,
    scales,
    means,
    strides,
    num_heads,
    num_tokens,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Dequantise some tokens of one head and batch row."""
    batch, head, tile = _place(num_heads, tl.cdiv(num_tokens, BLOCK_ROWS))
    rows, dims = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIMS)[None, :]
    is_here = (rows < num_tokens)[:, None] & (dims < HEAD_DIM)
    at = offset_of(strides[1], batch, head, rows)[:, None] * UNIT + dims
    numbers = tl.load(data + at, mask=is_here, other=0.0).to(tl.float32)
    # Tokens of one block share a row of scales.
    # pyrefly: ignore[bad-assignment]
    num_scales: tl.constexpr = 1 if BLOCK_SIZE % BLOCK_ROWS == 0 else BLOCK_ROWS
    first = tile * BLOCK_ROWS + tl.arange(0, num_scales)
    blocks, is_block = first // BLOCK_SIZE, (first < num_tokens)[:, None]
    at = offset_of(strides[2], batch, head, blocks)[:, None]
    if means is None:
        numbers *= tl.load(scales + at, mask=is_block, other=0.0)
        numbers = _rotated(numbers, dims, HEAD_DIM, BLOCK_ROWS, BLOCK_DIMS) * _signs(dims)
    else:
        is_block = is_block & (dims < HEAD_DIM)
        scale = tl.load(scales + at * UNIT + dims, mask=is_block, other=0.0)
        at = offset_of(strides[3], batch, head, blocks)[:, None] * UNIT + dims
        mean = tl.load(means + at, mask=is_block, other=0.0)
        numbers = numbers * scale.to(tl.float32) + mean.to(tl.float32)
    at = offset_of(strides[0], batch, head, rows)[:, None] * UNIT + dims
    tl.store(out + at, numbers.to(out.dtype.element_ty), mask=is_here)


@triton.jit
def _place(num_heads, num_blocks):
    """Return batch row, head and block of a program; neighbours are heads of the same tokens."""
    program = tl.program_id(0)
    rest = program // num_heads
    # 64 bits: offsets into long sequences exceed 2**31.
    batch, head = (rest // num_blocks).to(tl.int64), (program % num_heads).to(tl.int64)
    return batch, head, (rest % num_blocks).to(tl.int64)


@triton.jit
def _rotated(x, dims, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIMS: tl.constexpr):
    """Return rows times Hadamard matrices: one of 64 channels, then one of 16 if there are 80.

    Each begins at a multiple of its width. So a channel's partner is the one whose number differs
    in one bit; the last channels, whose matrix is too narrow, have none and stay.
    """
    share = tl.where(dims < HEAD_DIM, 1.0, 0.0)
    for bit in tl.static_range(15):
        if (2 << bit) <= HEAD_DIM:
            share = tl.where(dims < HEAD_DIM - HEAD_DIM % (2 << bit), (2 << bit) ** -0.5, share)
    x *= share
    for bit in tl.static_range(15):
        if (2 << bit) <= HEAD_DIM:
            partner = _partner(x, bit, BLOCK_ROWS, BLOCK_DIMS)
            sums = partner + tl.where((dims >> bit) & 1 == 0, x, -x)
            if HEAD_DIM % (2 << bit) == 0:
                x = sums
            else:
                x = tl.where(dims < HEAD_DIM - HEAD_DIM % (2 << bit), sums, x)
    return x


@triton.jit
def _partner(x, bit, BLOCK_ROWS: tl.constexpr, BLOCK_DIMS: tl.constexpr):
    """Return for each channel the number of the one whose number differs in a bit."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.reshape(bits, (BLOCK_ROWS * BLOCK_DIMS // (2 << bit), 2, 1 << bit))
    # A reduction of two is one exchange between threads, and none within a thread.
    partners = tl.reshape(bits ^ tl.xor_sum(bits, 1, keep_dims=True), (BLOCK_ROWS, BLOCK_DIMS))
    return partners.to(tl.float32, bitcast=True)


@triton.jit
def _signs(dims):
    """Return the signs of channels: the function of this name in `block_scales.py` has the why."""
    mixed = dims.to(tl.uint32) * 0x9E3779B1 + 0x7F4A7C15
    for i in tl.static_range(5):
        mixed = mixed ^ (mixed >> (16 >> i))
    return 1.0 - 2.0 * (mixed & 1).to(tl.float32)


@triton.jit
def _largest(x, axis):
    """Return the largest absolute number of an axis, or a NaN if there is one."""
    # As integers: the bits of a NaN are larger than those of all numbers.
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    largest = tl.max(bits, axis, keep_dims=True)
    return largest.to(tl.float32, bitcast=True)  # pyrefly: ignore[missing-attribute]


@triton.jit
def _positive(scale):
    """Replace the scale of zeros."""
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def _over(x, y):
    """Return the quotient, rounded to nearest: that of `/` is not exact on GPUs."""
    return tl.div_rn(x, y)


@triton.jit
def _rounded(x, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """Return numbers in a dtype of 8 bits."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if dtype == tl.int8:
        # Floats from 2**23 on have no fraction: this sum is rounded to nearest even, and its low
        # bits are the integer.
        return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return x.to(dtype)
