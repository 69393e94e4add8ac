"""Merging of partial results.

A partial attention result is (out, lse). Two of them over disjoint keys merge exactly (Milakov
and Gimelshein, 2018, arXiv 1805.02867); (0, -inf) is the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.compute.memory import WHOLE
from dtensor_ring.compute.sums import Part, Sum
from dtensor_ring.compute.together import put_together


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block into `out` `(B, N, L, H)` and `lse` `(B, N, L)`, in place.

    A row that neither side has seen stays (0, -inf).

    Args:
        out: result so far, overwritten.
        lse: its log-sum-exp, overwritten.
        block_out: result over other keys.
        block_lse: its log-sum-exp.
    """
    parts = Part(WHOLE, out, lse), Part(WHOLE, block_out, block_lse)
    put_together(Sum(out, parts, lse))


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
