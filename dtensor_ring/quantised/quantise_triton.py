"""Keys and values to eight bits and back on GPUs: one pass over memory, one launch for both.

What is computed is defined by `dtensor_ring/quantised/block_scales.py`. Sums, products and
quotients are the same here, in the same order and never fused, so bits are those of CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_ring.compute.merge_triton import offset_of, plain

# The most numbers of a program that quantises a block: 64 of each of its 512 threads.
MAX_NUMBERS = 1 << 15

# Numbers of a warp, as long as there are warps. With 64 numbers a thread in place of 32, an H200
# took 0.7 to 1.0 of the time where threads exchange numbers, and 1.1 to 1.3 where they do not:
# values that are dequantised.
NUMBERS_OF_WARP, OF_WARP_WITHOUT_EXCHANGE, MAX_WARPS = 2048, 1024, 16

EightBits = tuple[Tensor, Tensor, Tensor | None]
"""Data, scales and means of a `Quantised`; keys have no means."""


def fits(block_size: int, head_dim: int) -> bool:
    """Return whether the registers of a program hold a block, so that each number is read once.

    Both sizes are rounded up to powers of two. Blocks of 64 tokens may have a head dim of 512.
    """
    return _power(block_size) * _power(head_dim) <= MAX_NUMBERS


def quantise(x: Tensor, into: EightBits, largest: float, block_size: int) -> None:
    """Write keys or values in eight bits, into memory of any strides.

    Args:
        x: `(B, N, L, H)`.
        into: data, scales and means.
        largest: the largest number of the dtype of the data.
        block_size: tokens of a block.
    """
    side = _to_quantise(x, into, block_size)
    _launch(_quantise, {"": side}, block_size, LARGEST=tl.constexpr(largest))


# Before the names of sizes in launches of keys and values.
PREFIXES = "KEY_", "VALUE_"


def quantise_pair(
    pair: tuple[Tensor, Tensor], into: tuple[EightBits, EightBits], largest: float, block_size: int
) -> None:
    """Write keys and values in eight bits by one launch, see `quantise`.

    The memory may be that of a message, so that nothing is copied into it afterwards.
    """
    sides = (_to_quantise(x, to, block_size) for x, to in zip(pair, into, strict=True))
    both = dict(zip(PREFIXES, sides, strict=True))
    _launch(_quantise_pair, both, block_size, LARGEST=tl.constexpr(largest))


def _to_quantise(x: Tensor, into: EightBits, block_size: int) -> _LaunchSide:
    x = x if x.stride(3) == 1 else x.contiguous()
    return _LaunchSide(x, into, block_size, NUMBERS_OF_WARP)


def dequantise(source: EightBits, out: Tensor, block_size: int) -> None:
    """Write keys or values in the user's basis.

    Args:
        source: data, scales and means.
        out: `(B, N, L, H)` in any floating dtype and of any strides, overwritten.
        block_size: tokens of a block.
    """
    _launch(_dequantise, {"": _to_dequantise(source, out)}, block_size)


def dequantise_pair(
    source: tuple[EightBits, EightBits], out: tuple[Tensor, Tensor], block_size: int
) -> None:
    """Write keys and values in the user's basis by one launch, see `dequantise`."""
    sides = (_to_dequantise(parts, x) for parts, x in zip(source, out, strict=True))
    _launch(_dequantise_pair, dict(zip(PREFIXES, sides, strict=True)), block_size)


# The most numbers and tokens of a program that dequantises, whose tokens need not be a block.
MAX_TILE, MAX_TOKENS = 8192, 64


def _to_dequantise(source: EightBits, out: Tensor) -> _LaunchSide:
    rows = max(1, min(MAX_TOKENS, MAX_TILE // _power(out.shape[3])))
    warp = NUMBERS_OF_WARP if source[2] is None else OF_WARP_WITHOUT_EXCHANGE
    return _LaunchSide(out, source, rows, warp)


def _power(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


class _LaunchSide(NamedTuple):
    """Keys or values of a launch.

    Attributes:
        wide: `(B, N, L, H)`.
        eight_bits: data, scales and means.
        num_rows: tokens of a program.
        numbers_of_warp: numbers of a warp, as long as there are warps.
    """

    wide: Tensor
    eight_bits: EightBits
    num_rows: int
    numbers_of_warp: int

    @property
    def num_programs(self) -> int:
        """The number of programs, each of which has `num_rows` rows of a head."""
        batch, heads, num_tokens, _ = self.wide.shape
        return batch * heads * -(-num_tokens // self.num_rows)

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        numbers = _power(self.num_rows) * _power(self.wide.shape[3])
        return max(1, min(MAX_WARPS, numbers // self.numbers_of_warp))

    def given(self, prefix: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return tensors with strides, and what programs are compiled for, by name."""
        tensors = [x for x in (self.wide, *self.eight_bits) if x is not None]
        assert all(x.stride(3) == 1 or x.shape[3] == 1 for x in tensors), "last strides are 1"
        head_dim = self.wide.shape[3]
        unit, strides = _in_units(tensors, head_dim)
        sizes = {"HEAD_DIM": head_dim, "BLOCK_ROWS": _power(self.num_rows)}
        sizes |= {"BLOCK_DIMS": _power(head_dim), "UNIT": unit}
        constants = {prefix + name: tl.constexpr(size) for name, size in sizes.items()}
        return (self.wide, *self.eight_bits, strides), constants


def _launch(kernel: Any, sides: dict[str, _LaunchSide], block_size: int, **how: Any) -> None:
    """Launch programs for keys or values, or for keys and then values; names have a prefix."""
    first, *others = sides.values()
    if not first.wide.numel():
        return
    tensors, numbers = [], [*first.wide.shape[1:3]]
    for prefix, side in sides.items():
        of_side, constants = side.given(prefix)
        tensors += of_side
        how |= constants
    if others:
        numbers.append(first.num_programs)
    with torch.cuda.device_of(first.wide):
        kernel[(sum(x.num_programs for x in sides.values()),)](
            *tensors,
            *numbers,
            BLOCK_SIZE=tl.constexpr(block_size),
            **how,
            # A product that is fused with a sum is not rounded, so bits would differ.
            enable_fp_fusion=False,
            num_warps=max(x.num_warps for x in sides.values()),
        )


# The most numbers that a thread loads or stores at once: 16 bytes of a dtype of 8 bits.
MAX_UNIT = 16


def _in_units(tensors: Sequence[Tensor], head_dim: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return how many numbers divide the head dim and all strides, and the strides in this unit."""
    # So the compiler knows how rows are aligned without their strides. Scales of keys have no
    # channels, and strides of their own.
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
    """Quantise keys or values, a block of tokens in each program."""
    _quantise_rows(
        *(tl.program_id(0), x, data, scales, means, strides, num_heads, num_tokens),
        *(HEAD_DIM, BLOCK_SIZE, BLOCK_ROWS, BLOCK_DIMS, UNIT, LARGEST),
    )


@triton.jit(do_not_specialize=["num_tokens", "num_keys"])
def _quantise_pair(
    key,
    key_data,
    key_scales,
    key_means,
    key_strides,
    value,
    value_data,
    value_scales,
    value_means,
    value_strides,
    num_heads,
    num_tokens,
    num_keys,
    KEY_HEAD_DIM: tl.constexpr,
    KEY_BLOCK_ROWS: tl.constexpr,
    KEY_BLOCK_DIMS: tl.constexpr,
    KEY_UNIT: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    VALUE_BLOCK_ROWS: tl.constexpr,
    VALUE_BLOCK_DIMS: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Quantise keys in the first programs, and values in the others."""
    program = tl.program_id(0)
    if program < num_keys:
        _quantise_rows(
            *(program, key, key_data, key_scales, key_means, key_strides),
            *(num_heads, num_tokens, KEY_HEAD_DIM, BLOCK_SIZE),
            *(KEY_BLOCK_ROWS, KEY_BLOCK_DIMS, KEY_UNIT, LARGEST),
        )
    else:
        _quantise_rows(
            *(program - num_keys, value, value_data, value_scales, value_means, value_strides),
            *(
                num_heads,
                num_tokens,
                VALUE_HEAD_DIM,
                BLOCK_SIZE,
                VALUE_BLOCK_ROWS,
                VALUE_BLOCK_DIMS,
            ),
            *(VALUE_UNIT, LARGEST),
        )


@triton.jit
def _quantise_rows(
    program,
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
    batch, head, block = _place(program, num_heads, tl.cdiv(num_tokens, BLOCK_SIZE))
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
        # The mean is subtracted as it is kept, in 16 bits, so that adding it restores the number.
        mean = mean.to(tl.float32).to(tl.bfloat16)
        numbers = tl.where(is_row, numbers - mean.to(tl.float32), 0.0)
        # The scale divides as it is kept, too.
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
    """Dequantise keys or values, some tokens in each program."""
    _dequantise_rows(
        *(tl.program_id(0), out, data, scales, means, strides, num_heads, num_tokens),
        *(HEAD_DIM, BLOCK_SIZE, BLOCK_ROWS, BLOCK_DIMS, UNIT),
    )


@triton.jit(do_not_specialize=["num_tokens", "num_keys"])
def _dequantise_pair(
    key,
    key_data,
    key_scales,
    key_means,
    key_strides,
    value,
    value_data,
    value_scales,
    value_means,
    value_strides,
    num_heads,
    num_tokens,
    num_keys,
    KEY_HEAD_DIM: tl.constexpr,
    KEY_BLOCK_ROWS: tl.constexpr,
    KEY_BLOCK_DIMS: tl.constexpr,
    KEY_UNIT: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    VALUE_BLOCK_ROWS: tl.constexpr,
    VALUE_BLOCK_DIMS: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Dequantise keys in the first programs, and values in the others."""
    program = tl.program_id(0)
    if program < num_keys:
        _dequantise_rows(
            *(program, key, key_data, key_scales, key_means, key_strides),
            *(num_heads, num_tokens, KEY_HEAD_DIM, BLOCK_SIZE),
            *(KEY_BLOCK_ROWS, KEY_BLOCK_DIMS, KEY_UNIT),
        )
    else:
        _dequantise_rows(
            *(program - num_keys, value, value_data, value_scales, value_means, value_strides),
            *(
                num_heads,
                num_tokens,
                VALUE_HEAD_DIM,
                BLOCK_SIZE,
                VALUE_BLOCK_ROWS,
                VALUE_BLOCK_DIMS,
            ),
            VALUE_UNIT,
        )


@triton.jit
def _dequantise_rows(
    program,
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
    batch, head, tile = _place(program, num_heads, tl.cdiv(num_tokens, BLOCK_ROWS))
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
def _place(program, num_heads, num_blocks):
    """Return batch row, head and block of a program; neighbours are heads of the same tokens."""
    rest = program // num_heads
    # 64 bits: offsets into long sequences exceed 2**31.
    batch, head = (rest // num_blocks).to(tl.int64), (program % num_heads).to(tl.int64)
    return batch, head, (rest % num_blocks).to(tl.int64)


@triton.jit
def _rotated(x, dims, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIMS: tl.constexpr):
    """Return rows times Hadamard matrices: one of 64 channels, then one of 16 if there are 80."""
    # Each begins at a multiple of its width. So a channel's partner is the one whose number differs
    # in one bit; the last channels, whose matrix is too narrow, have none and stay.
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
