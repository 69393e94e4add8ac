"""Merging of partial results.

A partial attention result is (out, lse). Two of them over disjoint keys merge exactly (Milakov
and Gimelshein, 2018, arXiv 1805.02867); (0, -inf) is the identity.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from math import isfinite

import torch
from torch import Tensor

PIECE = 1 << 16
"""Numbers that are cast at a time: 256 KiB of float32, which stay in a core's cache."""


def merge_(
    out: Tensor,
    lse: Tensor,
    block_out: Tensor,
    block_lse: Tensor,
    target: Tensor | None = None,
    bounded: bool = False,
) -> None:
    """Merge a block into `out` `(..., L, H)` and `lse` `(..., L)`, in place.

    `lse' = log(exp(lse) + exp(block_lse))` and `out' = out * sigmoid(lse - block_lse) + block_out *
    sigmoid(block_lse - lse)` (Milakov and Gimelshein, 2018, arXiv 1805.02867). A row that neither
    side has seen stays (0, -inf).

    Args:
        out: result so far, overwritten.
        lse: its log-sum-exp, overwritten.
        block_out: result over other keys.
        block_lse: its log-sum-exp.
        target: where the merged output goes, rounded to its dtype; `out` is then scratch memory.
            `None` merges into `out`.
        bounded: whether the differences of outputs are finite, see `is_bounded`. CPUs then take
            `out + (block_out - out) * weight`, which is one pass over memory instead of several.
    """
    if out.is_cuda and _has_triton():
        from dtensor_ring.compute.merge_triton import merge_ as fused

        fused(out, lse, block_out, block_lse, out if target is None else target)
        return
    # A row that neither side has seen gives -inf - -inf, which is nan: then nothing is added.
    weight = (block_lse - lse).sigmoid_().nan_to_num_(0.0).unsqueeze(-1)
    kept = None if bounded else (lse - block_lse).sigmoid_().nan_to_num_(1.0).unsqueeze(-1)
    torch.logaddexp(lse, block_lse, out=lse)
    target = out if target is None else target
    if kept is not None:
        # An infinite output stays infinite: inf - inf would be nan.
        target.copy_(out * kept + block_out * weight)
    elif out.dtype == block_out.dtype == target.dtype == weight.dtype:
        # One dtype everywhere: no cast, so no scratch buffer either.
        target.copy_(out.lerp_(block_out, weight))
    else:
        _mix(out, block_out, weight, target)


def merge_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge W parts, `(W, ..., H)` and `(W, ...)`: `(out, lse)` of all of them.

    As `merge_`, in the order of the parts: ranks that have the same parts get the same bits.

    >>> merge_parts(torch.tensor([[0.0], [4.0]]), torch.zeros(2))[0]
    tensor([2.])
    """
    lse = lses.logsumexp(0)
    # -inf - -inf is nan, in a row that nobody has seen: nothing is added.
    weights = (lses - lse).exp_().nan_to_num_(0.0)
    return (outs * weights.unsqueeze(-1)).sum(0), lse


def merge_gradients(
    grad_out: Tensor, grad_lse: Tensor, outs: list[Tensor], lses: list[Tensor], lse: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the parts that `merge_` merged, from those of what it made of them.

    The merged output is the mean of the parts, with weights `w = exp(lse of the part - lse)`. So
    the gradient of a part's output is `w * grad_out`, and that of its lse `w * (p - mean of all p +
    grad_lse)` with `p = sum(grad_out * out of the part)`. Both are 0 in rows that the part has not
    seen.

    Args:
        grad_out: gradient of the merged output `(..., L, H)`.
        grad_lse: gradient of the merged lse `(..., L)`.
        outs: the parts' outputs.
        lses: their log-sum-exp.
        lse: the merged one.
    """
    wide = grad_out.to(lse.dtype)
    products = [(wide * out).sum(-1) for out in outs]
    # Where neither has seen anything, -inf - -inf is nan.
    unseen = [part == -torch.inf for part in lses]
    weights = [
        (part - lse).exp().masked_fill(hidden, 0.0)
        for part, hidden in zip(lses, unseen, strict=True)
    ]
    slope = grad_lse - sum(w * p for w, p in zip(weights, products, strict=True))
    grad_outs = [(wide * weight.unsqueeze(-1)).to(grad_out.dtype) for weight in weights]
    grad_lses = [
        (weight * (product + slope)).masked_fill(hidden, 0.0)  # 0 times nan is nan
        for weight, product, hidden in zip(weights, products, unseen, strict=True)
    ]
    return grad_outs, grad_lses


def is_bounded(values: Tensor) -> bool:
    """Whether outputs, which are means of these values, differ by finite numbers.

    Looks at values on CPUs only: on a GPU the host would wait for the answer.
    """
    # One pass over the values costs less than any kernel. Their norm is finite only if all of them
    # are, and small enough to be subtracted.
    wide = torch.promote_types(values.dtype, torch.float32)
    return values.is_cpu and isfinite(torch.linalg.vector_norm(values, dtype=wide).item())


def _mix(out: Tensor, block_out: Tensor, weight: Tensor, target: Tensor) -> None:
    """Interpolate in the dtype of the weights, some rows at a time.

    Small pieces keep the casts in cache and reuse one scratch buffer.
    """
    num_rows = out.shape[-2]
    # Some rows of all heads, so that weights and outputs are sliced alike.
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
