"""Attention sinks: a learned logit per query head that takes part in the softmax, without a value.

Sinks are as in Xiao et al., 2023 (arXiv 2309.17453), in the form of gpt-oss. Let `Z = exp(lse)` be
the sum over the keys, and `s` the sink of the head. Then the softmax divides by `Z + exp(s)`. So a
sink is one more score, with a value of 0. Sinks enter once, after all keys are merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import Saved
from dtensor_ring.compute.merge import sink_weight


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale `out` in place for a softmax with sinks, and return the new lse.

    `out' = out * Z / (Z + exp(s)) = out * sigmoid(lse - s)` and `lse' = log(Z + exp(s))`. A row
    that sees no key keeps `out` 0 and gets the lse of its sink.

    >>> out, lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    >>> add_sinks(out, lse, torch.zeros(1)).exp(), out
    (tensor([[[2.]]]), tensor([[[[0.5000, 0.5000]]]]))

    Args:
        out: attention without sinks `(B, N, L, Hv)`, float32 or wider.
        lse: log-sum-exp of the scores `(B, N, L)`.
        sinks: one logit for each head `(N,)`.
    """
    out.mul_(sink_weight(lse, sinks).unsqueeze(-1))
    return torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))


def sinks_gradient(saved: Saved, sinks: Tensor | None) -> Tensor:
    """Return the gradient of the sinks `(N,)` from the local rows; empty without sinks.

    A sink is a score whose value is 0, so its gradient is that of any score in flash attention
    (Dao et al., 2022, arXiv 2205.14135, appendix B.4). With `p = exp(s - lse')`, it is the sum over
    the rows of `p * (grad_lse - sum(grad_out * out'))`.

    Args:
        saved: outputs of the local rows; `out` and `lse` include the sinks.
        sinks: the logits `(N,)` that `add_sinks` was given.
    """
    if sinks is None:
        return saved.out.new_empty(0)
    slope = -(saved.grad_out.to(saved.lse.dtype) * saved.out).sum(-1)
    if saved.grad_lse is not None:
        slope += saved.grad_lse
    weight = (sinks.to(slope.dtype).view(1, -1, 1) - saved.lse).exp()
    # lse is -inf only where the sink is -inf, too; the sink has no weight there.
    weight = weight.masked_fill_(saved.lse == -torch.inf, 0.0)
    return (weight * slope).sum((0, 2)).to(sinks.dtype)
