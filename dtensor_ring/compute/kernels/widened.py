"""Provides the gradient of lse for kernels that do not support it."""

from __future__ import annotations

from dataclasses import replace

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
from dtensor_ring.compute.memory import empty, order_of

# The number of extra columns. Head dims that are multiples of 8 remain multiples of 8.
COLUMNS = 8

# The number of 16-bit partials that hold one float32.
PARTS = 3

# Bounds of the unit of a row: powers of two that every dtype holds.
SMALLEST, LARGEST = 2.0**-14, 2.0**15


class WidenedKernel(Kernel):
    """Adds the gradient of lse to a kernel that does not support it, by extra columns.

    Note [Gradient of lse in columns]: the gradient of a score is `p * (grad_out.v - delta +
    grad_lse)`, where kernels compute `delta = sum(grad_out * out)`. So `out` and `grad_out` get
    extra columns whose products add up to `-grad_lse`. The extra columns of the value are 0, which
    does not change `grad_out.v`. If query and value have one head dim, query and key also get
    columns of 0, which do not change the scores. The gradients of all extra columns are dropped.
    Kernels sum `delta` in float32 or wider. The products are as exact: `grad_lse` is divided by a
    unit for each row, and stored as three numbers of 16 bits.

    Args:
        kernel: a kernel whose backward follows the formula of `Kernel`.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.wrapped = kernel
        self.name, self.has_segments = kernel.name, kernel.has_segments  # type: ignore[misc]

    def missing(self) -> str | None:
        return self.wrapped.missing()

    def supports(self, problem: Problem) -> str | None:
        narrow = replace(problem, differentiable_lse=False)
        if reason := self.wrapped.supports(narrow):
            return reason
        head_dim, value_head_dim = problem.head_dim, problem.value_head_dim
        head_dim += COLUMNS if head_dim == value_head_dim else 0
        wide = replace(narrow, head_dim=head_dim, value_head_dim=value_head_dim + COLUMNS)
        reason = self.wrapped.supports(wide)
        return reason and f"{reason}, with the {COLUMNS} columns that the gradient of lse takes"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        return self.wrapped.forward(q, k, v, launch, scores)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        head_dim, value_head_dim = q.shape[-1], v.shape[-1]
        if head_dim == value_head_dim:
            q, k = _widened(q), _widened(k)
        wide = _with_columns(saved, is_tile=launch.segments is None)
        dq, dk, dv = self.wrapped.backward(wide, q, k, _widened(v), launch, scores)
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_head_dim]


def _widened(x: Tensor) -> Tensor:
    """Return a copy with extra columns of 0, in the same memory order."""
    head_dim = x.shape[-1]
    wide = empty(x, (*x.shape[:-1], head_dim + COLUMNS), order_of(x))
    wide[..., :head_dim] = x
    wide[..., head_dim:] = 0
    return wide


def _with_columns(saved: Saved, is_tile: bool) -> Saved:
    """Widen `out` and `grad_out`, so each row's sum of products is smaller by `grad_lse`."""
    assert saved.grad_lse is not None, "the kernel itself serves without"
    out, grad_out = _widened(saved.out), _widened(saved.grad_out)
    # With segments, lse is `(N, T)`, but the other tensors are token-major.
    rest = saved.grad_lse if is_tile else saved.grad_lse.transpose(0, 1)
    # float16 only covers 6e-8 to 65504, so scale each row to about 1.
    unit = rest.abs().clamp(SMALLEST, LARGEST).to(out.dtype)
    rest = rest / unit
    for column in range(saved.out.shape[-1], saved.out.shape[-1] + PARTS):
        part = rest.to(out.dtype)
        out[..., column], grad_out[..., column] = -part, unit
        rest = rest - part
    return Saved(grad_out, out, saved.lse)
