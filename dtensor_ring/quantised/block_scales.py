"""Keys and values in eight bits, with scales by block: the same bits on all ranks.

Plain PyTorch defines them. On GPUs `quantise_triton.py` computes keys and values in one launch.

Only sums and products of two numbers occur, in one order for each token. So a token's bits do not
depend on which others are dequantised with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtensor_ring.compute.memory import TOKEN_MAJOR, empty
from dtensor_ring.compute.merge import has_triton

BLOCK_SIZE = 64


class Format(NamedTuple):
    """A format of 8 bits.

    Attributes:
        name: what users call it.
        dtype: its dtype.
        largest: its largest number.
        capability: the oldest GPUs whose Triton kernels convert to it.
    """

    name: str
    dtype: torch.dtype
    largest: float
    capability: tuple[int, int] = (0, 0)


FORMATS = {
    "int8": Format("int8", torch.int8, 127.0),
    "fp8": Format("fp8", torch.float8_e4m3fn, 448.0, (8, 9)),
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


# Note [Incoherent processing]: a few large channels would set the scale of a block, and the others
# would be rounded to nothing. So keys are multiplied by a random orthogonal matrix before they are
# quantised, which spreads outliers over all channels, and by its transpose after (Shah et al.,
# 2024, arXiv 2407.08608). The matrix is a diagonal of signs, then a Hadamard matrix. Values keep
# their channels: in a block, each channel has its scale, after its mean was subtracted.
def quantise_keys(x: Tensor, format: Format, block_size: int = BLOCK_SIZE) -> Quantised:
    """Quantise keys: rotated, with one float32 scale for all channels of a block.

    Args:
        x: `(B, N, L, H)`. A block with an infinity or NaN becomes NaN or infinite as a whole.
        format: the format of 8 bits.
        block_size: tokens of a block.

    Raises:
        ValueError: if the head dim is 0, `block_size` is less than 1, or the GPU lacks the format.

    >>> quantise_keys(torch.ones(1, 2, 100, 8), FORMATS["int8"]).scales.shape
    torch.Size([1, 2, 2, 1])
    """
    _check_sizes(x, block_size)
    if _has_kernel(x, block_size):
        return _by_kernel(x, format, block_size, is_keys=True)
    # data = round(x D H / scale), and x = scale * data H D: signs and Hadamard undo themselves.
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
        ValueError: if the head dim is 0, `block_size` is less than 1, or the GPU lacks the format.

    >>> quantise_values(torch.ones(1, 2, 100, 8), FORMATS["int8"]).means.shape
    torch.Size([1, 2, 2, 8])
    """
    _check_sizes(x, block_size)
    if _has_kernel(x, block_size):
        return _by_kernel(x, format, block_size, is_keys=False)
    # data = round((x - mean) / scale), for each channel of a block.
    blocks = _blocked(x.float(), block_size)
    is_token = _blocked(torch.ones_like(x[:1, :1, :, :1], dtype=torch.float32), block_size)
    # In float64, so that the order of the sum, which devices choose, does not show once rounded.
    means = blocks.sum(3, keepdim=True, dtype=torch.float64)
    # Over the tokens that there are: zeros that fill up the last block are none of them.
    means *= 1.0 / is_token.sum(3, keepdim=True, dtype=torch.float64)
    # Rounded before they are subtracted, so that adding them restores the numbers.
    means = means.float().bfloat16()
    blocks = (blocks - means.float()) * is_token
    scales = _positive((blocks.abs().amax(3, keepdim=True) / format.largest).bfloat16())
    data = _rounded(blocks, scales.float(), x, format)
    return Quantised(data, scales.squeeze(3), means.squeeze(3), block_size)


def quantise_pair(
    key: Tensor,
    value: Tensor,
    format: Format,
    block_size: int = BLOCK_SIZE,
    into: tuple[Quantised, Quantised] | None = None,
) -> tuple[Quantised, Quantised]:
    """Quantise keys and values, on a GPU by one launch.

    Args:
        key: `(B, N, L, H)`, see `quantise_keys`.
        value: `(B, N, L, Hv)`, see `quantise_values`.
        format: the format of 8 bits.
        block_size: tokens of a block.
        into: memory for both, such as that of a message; only if `has_pair_kernel`.

    Raises:
        ValueError: if a head dim is 0, `block_size` is less than 1, or the GPU lacks the format.

    >>> key, value = quantise_pair(torch.ones(1, 2, 9, 8), torch.ones(1, 2, 9, 4), FORMATS["int8"])
    >>> key.data.shape, value.means.shape
    (torch.Size([1, 2, 9, 8]), torch.Size([1, 2, 1, 4]))
    """
    if not has_pair_kernel(key, value, block_size):
        numbers = quantise_keys(key, format, block_size)
        return numbers, quantise_values(value, format, block_size)
    from dtensor_ring.quantised import quantise_triton

    _check_sizes(key, block_size)
    _check_sizes(value, block_size)
    if into is None:
        into = (
            _empty_like(key, format, block_size, is_keys=True),
            _empty_like(value, format, block_size, is_keys=False),
        )
    memory = _tensors(into[0]), _tensors(into[1])
    quantise_triton.quantise_pair((key, value), memory, format.largest, block_size)
    return into


def has_pair_kernel(key: Tensor, value: Tensor, block_size: int = BLOCK_SIZE) -> bool:
    """Return whether one launch on a GPU quantises keys and values in blocks of this size."""
    return _has_kernel(key, block_size) and _has_kernel(value, block_size)


def _tensors(q: Quantised) -> tuple[Tensor, Tensor, Tensor | None]:
    return q.data, q.scales, q.means


def dequantise_pair(key: Quantised, value: Quantised, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values in the user's basis and a dtype, on a GPU by one launch.

    >>> both = quantise_pair(torch.ones(1, 2, 9, 8), torch.ones(1, 2, 9, 4), FORMATS["int8"])
    >>> [x.shape[3] for x in dequantise_pair(*both, torch.float32)]
    [8, 4]
    """
    if not has_pair_kernel(key.data, value.data, 1) or key.block_size != value.block_size:
        return dequantise(key, dtype), dequantise(value, dtype)
    from dtensor_ring.quantised import quantise_triton

    of_key, of_value = (empty(q.data, q.data.shape, TOKEN_MAJOR, dtype) for q in (key, value))
    source = _tensors(key), _tensors(value)
    quantise_triton.dequantise_pair(source, (of_key, of_value), key.block_size)
    return of_key, of_value


def dequantise(q: Quantised, dtype: torch.dtype) -> Tensor:
    """Return keys or values `(B, N, L, H)` in the user's basis and a dtype.

    >>> x = torch.randn(1, 2, 100, 8)
    >>> error = dequantise(quantise_keys(x, FORMATS["int8"]), x.dtype) - x
    >>> bool(error.abs().max() < 0.05)
    True
    """
    if _has_kernel(q.data, 1):
        from dtensor_ring.quantised import quantise_triton

        out = empty(q.data, q.data.shape, TOKEN_MAJOR, dtype)
        quantise_triton.dequantise((q.data, q.scales, q.means), out, q.block_size)
        return out
    length = q.data.shape[2]

    def of_tokens(x: Tensor) -> Tensor:
        return x.float().repeat_interleave(q.block_size, 2)[:, :, :length]

    x = q.data.float() * of_tokens(q.scales)
    if q.means is None:
        # The transform is its own inverse, and so are the signs: they come off in reverse order.
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
    # Keys have a float32 scale; values a scale and a mean of two bytes for each channel.
    of_block = 4 if kind == "keys" else 2 * 2 * head_dim
    num_blocks = -(-num_tokens // block_size)
    return batch * heads * (num_tokens * head_dim * format.dtype.itemsize + num_blocks * of_block)


def _check_sizes(x: Tensor, block_size: int) -> None:
    if block_size < 1:
        raise ValueError(f"a block has {block_size} tokens: choose a block_size of 1 or more")
    if not x.shape[3]:
        raise ValueError("keys and values of head dim 0 have no eight bits: leave kv_dtype out")


def _has_kernel(x: Tensor, block_size: int) -> bool:
    """Return whether a launch on a GPU serves blocks of this size, which its registers bound."""
    if not (x.is_cuda and has_triton()):
        return False
    from dtensor_ring.quantised import quantise_triton

    return quantise_triton.fits(block_size, x.shape[3])


def _by_kernel(x: Tensor, format: Format, block_size: int, is_keys: bool) -> Quantised:
    """Quantise in one launch, into memory in the order in which packets travel."""
    from dtensor_ring.quantised import quantise_triton

    q = _empty_like(x, format, block_size, is_keys)
    quantise_triton.quantise(x, _tensors(q), format.largest, block_size)
    return q


def _empty_like(x: Tensor, format: Format, block_size: int, is_keys: bool) -> Quantised:
    """Allocate memory for keys or values on a GPU, and refuse formats that the GPU lacks."""
    found = torch.cuda.get_device_capability(x.device)
    if found < format.capability:
        needed, has = (".".join(map(str, version)) for version in (format.capability, found))
        raise ValueError(
            f"kv_dtype={format.name!r} needs a GPU of compute capability {needed} or newer, and "
            f"this one has {has}: choose kv_dtype='int8'"
        )
    batch, heads, num_tokens, head_dim = x.shape
    of_blocks = (batch, heads, -(-num_tokens // block_size), 1 if is_keys else head_dim)
    data = empty(x, x.shape, TOKEN_MAJOR, format.dtype)
    scales = empty(x, of_blocks, TOKEN_MAJOR, torch.float32 if is_keys else torch.bfloat16)
    return Quantised(data, scales, None if is_keys else torch.empty_like(scales), block_size)


def _blocked(x: Tensor, block_size: int) -> Tensor:
    """Return `(B, N, blocks, block_size, H)`; the last block is filled up with zeros."""
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
    """Return `(..., H)` times an orthogonal matrix that is its own inverse, in O(H log H)."""
    # It is block-diagonal: of the largest power of two that fits, then of those of the rest.
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
    rows.mul_(width**-0.5)  # first, as a sum of large numbers might overflow
    while half < width:
        first, second = rows.unflatten(0, (width // (2 * half), 2, half)).unbind(1)
        difference = first - second
        first += second
        second.copy_(difference)
        half *= 2
    return rows.movedim(0, -1)
