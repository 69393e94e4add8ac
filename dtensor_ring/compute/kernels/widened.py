"""The gradient of lse, for kernels that have none."""

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

COLUMNS = 8
"""By how many columns tensors become wider: head dims that are multiples of 8 stay so."""

PARTS = 3
"""Numbers of 16 bits that hold one of float32."""

SMALLEST, LARGEST = 2.0**-14, 2.0**15
"""Powers of two that every dtype holds; between them a gradient of lse is its own unit."""


class WidenedKernel(Kernel):
    """A kernel without a gradient of lse, to which wider tensors bring it.

    Note [Gradient of lse in columns]: the gradient of a score is `p * (grad_out.v - delta +
    grad_lse)`, where kernels compute `delta = sum(grad_out * out)` from the two tensors. So both
    get columns whose products add up to `-grad_lse`. The columns of the value are 0, and leave
    `grad_out.v` as it is. A kernel of one head dim gets columns of 0 in query and key as well,
    which leave the scores as they are. What comes back as the gradients of all these columns is
    dropped. `delta` is summed in float32 or wider, and the products are as exact as that: numbers
    of 16 bits hold `grad_lse` in a unit of each row, in three parts.

    Args:
        kernel: one whose backward follows the formula of `Kernel`.
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
    """A copy with columns of 0, in the same order of memory."""
    head_dim = x.shape[-1]
    wide = empty(x, (*x.shape[:-1], head_dim + COLUMNS), order_of(x))
    wide[..., :head_dim] = x
    wide[..., head_dim:] = 0
    return wide


def _with_columns(saved: Saved, is_tile: bool) -> Saved:
    """Wider `out` and `grad_out`, whose products add up to less by `grad_lse` in each row."""
    assert saved.grad_lse is not None, "the kernel itself serves without"
    out, grad_out = _widened(saved.out), _widened(saved.grad_out)
    # The lse of segments has heads first, their other tensors have them second.
    rest = saved.grad_lse if is_tile else saved.grad_lse.transpose(0, 1)
    # float16 covers 6e-8 to 65504 only, so each row is scaled to about 1.
    unit = rest.abs().clamp(SMALLEST, LARGEST).to(out.dtype)
    rest = rest / unit
    for column in range(saved.out.shape[-1], saved.out.shape[-1] + PARTS):
        part = rest.to(out.dtype)
        out[..., column], grad_out[..., column] = -part, unit
        rest = rest - part
    return Saved(grad_out, out, saved.lse)
