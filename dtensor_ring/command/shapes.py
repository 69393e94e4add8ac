"""A kernel that computes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.compute.kernels import Kernel, Launch, Problem, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Gradients, Result
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty


class Shapes(Kernel):
    """Returns memory of the right shapes, as any kernel does, with any content."""

    name = "shapes"

    def missing(self) -> None:
        return None

    def supports(self, problem: Problem) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        wide = torch.promote_types(q.dtype, torch.float32)
        shape = *q.shape[:3], v.shape[3]
        return empty(q, shape, TOKEN_MAJOR), q.new_empty(q.shape[:3], dtype=wide)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        grads = [empty(x, x.shape, TOKEN_MAJOR) for x in (q, k, v)]
        return grads[0], grads[1], grads[2]
