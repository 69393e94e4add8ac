"""A kernel that takes no time: what is left of a call is what the host does."""

from functools import cache

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import (
    Gradients,
    Kernel,
    Launch,
    Problem,
    Result,
    Saved,
    Scores,
)


class Instant(Kernel):
    """A kernel that takes no time: it returns the same zeros again."""

    name = "instant"

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        return zeros(q.shape), zeros(q.shape[:3])

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        return zeros(q.shape, 1), zeros(k.shape, 2), zeros(v.shape, 3)


@cache
def zeros(shape: torch.Size, which: int = 0) -> Tensor:
    """Zeros of a shape, token-major; `which` tells tensors of one shape apart."""
    if len(shape) < 4:
        return torch.zeros(shape)
    return torch.zeros(shape).transpose(1, 2).contiguous().transpose(1, 2)
