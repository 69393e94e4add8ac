"""Stand-in until the branch with the formats is merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    name: str
    dtype: torch.dtype
    largest: float


FORMATS = {
    "int8": Format("int8", torch.int8, 127.0),
    "fp8": Format("fp8", torch.float8_e4m3fn, 448.0),
}

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Quantised:
    data: Tensor
    scales: Tensor
    means: Tensor | None
    block_size: int = BLOCK_SIZE


def _blocked(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    wide = x.float()
    pad = -x.shape[2] % block_size
    wide = torch.nn.functional.pad(wide, (0, 0, 0, pad))
    inside = torch.arange(wide.shape[2], device=x.device) < x.shape[2]
    shape = (*x.shape[:2], -1 if x.numel() else wide.shape[2] // block_size, block_size, x.shape[3])
    return wide.reshape(shape), inside.view(-1, block_size, 1)


def _rounded(blocks: Tensor, scales: Tensor, length: int, format: Format) -> Tensor:
    scaled = blocks / scales.float()
    if format.dtype == torch.int8:
        scaled = scaled.round()
    scaled = scaled.clamp(-format.largest, format.largest)
    return scaled.flatten(2, 3)[:, :, :length].to(format.dtype)


def quantise_keys(x: Tensor, format: Format, block_size: int = BLOCK_SIZE) -> Quantised:
    blocks, _ = _blocked(x, block_size)
    scales = (blocks.abs().amax((3, 4), keepdim=True) / format.largest).clamp_min(1e-6)
    data = _rounded(blocks, scales, x.shape[2], format)
    return Quantised(data, scales.squeeze(3), None, block_size)


def quantise_values(x: Tensor, format: Format, block_size: int = BLOCK_SIZE) -> Quantised:
    blocks, inside = _blocked(x, block_size)
    means = (blocks.sum(3, keepdim=True) / inside.sum(1).view(1, 1, -1, 1, 1)).bfloat16()
    blocks = (blocks - means.float()) * inside
    scales = (blocks.abs().amax(3, keepdim=True) / format.largest).clamp_min(1e-6)
    scales = scales.bfloat16() * 1.01
    data = _rounded(blocks, scales, x.shape[2], format)
    return Quantised(data, scales.squeeze(3), means.squeeze(3), block_size)


def dequantise(q: Quantised, dtype: torch.dtype) -> Tensor:
    length = q.data.shape[2]

    def per_token(x: Tensor) -> Tensor:
        return x.float().repeat_interleave(q.block_size, 2)[:, :, :length]

    x = q.data.float() * per_token(q.scales)
    if q.means is not None:
        x = x + per_token(q.means)
    return x.to(dtype)


def num_bytes(shape: tuple[int, ...], format: Format, block_size: int, kind: str) -> int:
    batch, heads, length, dim = shape
    blocks = -(-length // block_size)
    side = 4 if kind == "keys" else 2 * 2 * dim
    return batch * heads * (length * dim + blocks * side)
