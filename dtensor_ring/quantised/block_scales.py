"""Keys and values in eight bits, with scales by block: plain PyTorch, the same bits on all ranks.

Note [Incoherent processing]: a few large channels would set the scale of a block, and the others
would be rounded to nothing. So keys are multiplied by a random orthogonal matrix before they are
quantised, which spreads outliers over all channels, and by its transpose after (Shah et al., 2024,
arXiv 2407.08608). The matrix is a diagonal of signs, then a Hadamard matrix. Values keep their
channels: each has a scale of its own in a block, after the block's mean was subtracted.

Only sums and products of two numbers occur, in one order for each token. So a token's bits do not
depend on which others are dequantised with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 64


class Format(NamedTuple):
    """A format of 8 bits.

    Attributes:
        name: what users call it.
        dtype: its dtype.
        largest: its largest number.
    """

    name: str
    dtype: torch.dtype
    largest: float


FORMATS = {
    "int8": Format("int8", torch.int8, 127.0),
    "fp8": Format("fp8", torch.float8_e4m3fn, 448.0),
}


@dataclass(frozen=True)
class Quantised:
    """Keys or values in eight bits.

    Attributes:
        data: `(B, N, L, H)` in a dtype of 8 bits.
        scales: by block of tokens, `(B, N, blocks, 1)` of keys, and `(B, N, blocks, H)` of values.
        means: of values, `(B, N, blocks, H)`; `None` for keys, whose `data` are rotated.
        block_size: tokens of a block; the last one may have fewer.
    """

    data: Tensor
    scales: Tensor
    means: Tensor | None = None
    block_size: int = BLOCK_SIZE


def quantise_keys(x: Tensor, format: Format, block_size: int = BLOCK_SIZE) -> Quantised:
    """Quantise keys: rotated, with one float32 scale for all channels of a block.

    Args:
        x: `(B, N, L, H)`. A block with an infinity or NaN becomes NaN or infinite as a whole.
        format: the format of 8 bits.
        block_size: tokens of a block.

    Raises:
        ValueError: if the head dim is 0, or `block_size` is less than 1.

    >>> quantise_keys(torch.ones(1, 2, 100, 8), FORMATS["int8"]).scales.shape
    torch.Size([1, 2, 2, 1])
    """
    blocks = _blocked(_hadamard(x.float() * _signs(x)), block_size)
    scales = _positive(blocks.abs().amax((3, 4), keepdim=True) / format.largest)
    return Quantised(_rounded(blocks, scales, x, format), scales.squeeze(3), None, block_size)


def quantise_values(x: Tensor, format: Format, block_size: int = BLOCK_SIZE) -> Quantised:
    """Quantise values: by channel of a block, with a mean and a scale in bfloat16.

    Args:
        x: `(B, N, L, H)`. A channel of a block with an infinity or NaN has no finite number left.
        format: the format of 8 bits.
        block_size: tokens of a block.

    Raises:
        ValueError: if the head dim is 0, or `block_size` is less than 1.

    >>> quantise_values(torch.ones(1, 2, 100, 8), FORMATS["int8"]).means.shape
    torch.Size([1, 2, 2, 8])
    """
    blocks = _blocked(x.float(), block_size)
    is_token = _blocked(torch.ones_like(x[:1, :1, :, :1], dtype=torch.float32), block_size)
    # Rounded before they are subtracted, so that adding them restores the numbers.
    means = (blocks.sum(3, keepdim=True) / is_token.sum(3, keepdim=True)).bfloat16()
    blocks = (blocks - means.float()) * is_token
    scales = _positive((blocks.abs().amax(3, keepdim=True) / format.largest).bfloat16())
    data = _rounded(blocks, scales.float(), x, format)
    return Quantised(data, scales.squeeze(3), means.squeeze(3), block_size)


def dequantise(q: Quantised, dtype: torch.dtype) -> Tensor:
    """Return keys or values `(B, N, L, H)` in the user's basis and a dtype.

    >>> x = torch.randn(1, 2, 100, 8)
    >>> error = dequantise(quantise_keys(x, FORMATS["int8"]), x.dtype) - x
    >>> bool(error.abs().max() < 0.05)
    True
    """
    length = q.data.shape[2]

    def of_tokens(x: Tensor) -> Tensor:
        return x.float().repeat_interleave(q.block_size, 2)[:, :, :length]

    x = q.data.float() * of_tokens(q.scales)
    if q.means is None:
        return (_hadamard(x) * _signs(x)).to(dtype)
    return (x + of_tokens(q.means)).to(dtype)


def num_bytes(shape: Sequence[int], format: Format, block_size: int, kind: str) -> int:
    """Return the bytes of quantised keys or values.

    Args:
        shape: `(B, N, L, H)`.
        format: the format of 8 bits.
        block_size: tokens of a block.
        kind: `"keys"` or `"values"`.

    >>> num_bytes((1, 2, 100, 8), FORMATS["int8"], 64, "keys")
    1616
    """
    batch, heads, num_tokens, head_dim = shape
    of_block = 4 if kind == "keys" else 2 * 2 * head_dim
    num_blocks = -(-num_tokens // block_size)
    return batch * heads * (num_tokens * head_dim * format.dtype.itemsize + num_blocks * of_block)


def _blocked(x: Tensor, block_size: int) -> Tensor:
    """Return `(B, N, blocks, block_size, H)`; the last block is filled up with zeros."""
    if block_size < 1:
        raise ValueError(f"a block has {block_size} tokens: choose a block_size of 1 or more")
    if not x.shape[3]:
        raise ValueError("keys and values of head dim 0 have no eight bits: leave kv_dtype out")
    padded = F.pad(x, (0, 0, 0, -x.shape[2] % block_size))
    return padded.unflatten(2, (padded.shape[2] // block_size, block_size))


def _positive(scales: Tensor) -> Tensor:
    """Replace the scales of blocks that have nothing but zeros."""
    return torch.where(scales == 0, 1.0, scales)


def _rounded(blocks: Tensor, scales: Tensor, like: Tensor, format: Format) -> Tensor:
    """Return the blocks over their scales in the format, for the tokens that there are."""
    scaled = (blocks / scales).flatten(2, 3)[:, :, : like.shape[2]]
    if not format.dtype.is_floating_point:
        scaled = scaled.round()
    return scaled.clamp(-format.largest, format.largest).to(format.dtype)


def _signs(x: Tensor) -> Tensor:
    """Return a sign for each channel, `(H,)`, the same on all ranks and devices."""
    channels = torch.arange(x.shape[3], device=x.device)
    # The parity of bits of a multiple: a fixed sequence that looks random.
    mixed = (channels * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
    for shift in (16, 8, 4, 2, 1):
        mixed = mixed ^ (mixed >> shift)
    return 1.0 - 2.0 * (mixed & 1)


def _hadamard(x: Tensor) -> Tensor:
    """Return `(..., H)` times an orthogonal matrix that is its own inverse, in O(H log H).

    It is block-diagonal: of the largest power of two that fits, then of those of the rest.
    """
    size, start, parts = x.shape[-1], 0, []
    while start < size:
        width = 1 << ((size - start).bit_length() - 1)
        parts.append(_butterflies(x[..., start : start + width]))
        start += width
    return torch.cat(parts, -1) if parts else x


def _butterflies(x: Tensor) -> Tensor:
    width, half = x.shape[-1], 1
    # Channels first: sums of two channels are of contiguous tokens then.
    rows = x.movedim(-1, 0).clone(memory_format=torch.contiguous_format)
    while half < width:
        first, second = rows.unflatten(0, (width // (2 * half), 2, half)).unbind(1)
        difference = first - second
        first += second
        second.copy_(difference)
        half *= 2
    return rows.mul_(1 / sqrt(width)).movedim(0, -1)
