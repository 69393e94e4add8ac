"""Merging of partial results.

A partial attention result is (out, lse). Two of them over disjoint keys merge exactly (Milakov
and Gimelshein, 2018, arXiv 1805.02867); (0, -inf) is the identity.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

PIECE = 1 << 16
"""Numbers that are cast at a time."""


def merge_(
    out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, target: Tensor | None = None
) -> None:
    """Merge a block into `out` `(..., L, H)` and `lse` `(..., L)`, in place.

    With a `target` that gets the merged output, rounded to its dtype, and `out` is used up. A row
    that neither side has seen stays (0, -inf).
    """
    if out.is_cuda and _has_triton():
        from dtensor_ring.merge_triton import merge_ as fused

        fused(out, lse, block_out, block_lse, out if target is None else target)
        return
    weight = (block_lse - lse).sigmoid_().nan_to_num_(0.0).unsqueeze(-1)  # -inf - -inf is nan
    torch.logaddexp(lse, block_lse, out=lse)
    target = out if target is None else target
    if out.dtype == block_out.dtype == target.dtype == weight.dtype:
        target.copy_(out.lerp_(block_out, weight))
    else:
        _mix(out, block_out, weight, target)


def _mix(out: Tensor, block_out: Tensor, weight: Tensor, target: Tensor) -> None:
    """Interpolate in the dtype of the weights, some rows at a time.

    What is cast stays in the processor's cache so, and in memory that is not fresh.
    """
    num_rows = out.shape[-2]
    at_a_time = max(1, PIECE * num_rows // max(1, out.numel()))
    like = out[..., :at_a_time, :]
    wide_out, wide_block = (torch.empty_like(like, dtype=weight.dtype) for _ in range(2))
    for start in range(0, num_rows, at_a_time):
        rows = ..., slice(start, start + at_a_time), slice(None)
        some = ..., slice(0, num_rows - start), slice(None)
        mixed = out[rows] if out.dtype == weight.dtype else wide_out[some].copy_(out[rows])
        target[rows].copy_(mixed.lerp_(wide_block[some].copy_(block_out[rows]), weight[rows]))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
