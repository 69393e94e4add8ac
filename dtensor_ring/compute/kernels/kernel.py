"""The contract between the ring and a block kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from dtensor_ring.compute.kernels.launch import Launch
from dtensor_ring.compute.kernels.problem import Problem
from dtensor_ring.compute.kernels.saved import Saved
from dtensor_ring.compute.kernels.scores import Scores

Result = tuple[Tensor, Tensor]
"""`out` and `lse`."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""


class Kernel(ABC):
    """A block kernel: attention of some queries over some keys, forward and backward.

    This is the whole contract between the ring and a kernel. Letters: B batch, N query heads, Nkv
    key heads, R rows (queries), C columns (keys), H head dim, Hv head dim of values.

    **A tile** is a launch without segments. `q` is `(B, N, R, H)`, `k` `(B, Nkv, C, H)` and
    `v` `(B, Nkv, C, Hv)`. `out` is `(B, N, R, Hv)` and `lse` `(B, N, R)`.

    **Segments** are many tiles, one after the other in memory. Only a kernel that sets
    `has_segments` gets them. `q` is `(T, N, H)`, `k` `(U, Nkv, H)` and `v` `(U, Nkv, Hv)`: all
    tokens of the launch's regions. `out` is `(T, N, Hv)` and `lse` `(N, T)`, heads first. Segment
    number s has the queries from `segments.rows[s]` to `segments.rows[s + 1]`, and sees the keys
    between the same two entries of `segments.cols`.

    **Inputs** have any strides whose last is 1. N is a multiple of Nkv, and B, R, C are at least 1.
    A kernel does not write to them.

    **Results** are fresh tensors, with a last stride of 1, that the caller may write to. `out` has
    the query's dtype, a gradient that of its tensor, and all are on the query's device. `lse` is
    the natural log-sum-exp of the scores, float32 or wider, float64 for float64 inputs.

    **The band** is `launch.mask`, in indices of the tile or of each segment: row i sees column j
    if and only if `i - left <= j <= i + right`, where `None` has no bound. In a tile every row sees
    something, and something sees every column. A tile with a causal mask is square, and so is every
    segment with both rows and columns whose mask is not full: a diagonal aligned top-left is then
    one aligned bottom-right.

    Note [Windows aligned bottom-right]: a kernel that aligns the last row with the last column
    takes a tile's bounds as `left + C - R` and `right + R - C`. A trimmed tile has `R <= C + left`
    and `C <= R + right`, so neither becomes negative, which such kernels take for unbounded. But
    flash attention 2 also takes a bound from C on for unbounded, and then an unbounded right side
    for C columns past the diagonal. Where R exceeds C by so much that the right side is as long, or
    has no bound, that hides keys from the first rows. So the planner cuts such tiles: one with a
    bound on the left has no bound on the right only if `R <= C`, and then `right + R - C < C`.

    **Rows without keys** occur in segments only: a segment may have no columns. Its rows get out 0
    and lse -inf, and gradients of 0. A segment may have no rows either: its keys get gradients
    of 0.

    **Backward** gets `out` and `lse` of the whole row, over all keys of the ring. With
    `p = exp(score - lse)` the gradient of a score is `p * (grad_out.v - sum(grad_out * out) +
    grad_lse)`, so that the gradients of the tiles of a row add up (Dao et al., 2022, arXiv
    2205.14135, appendix B.4). `saved` has the shapes of `out` and `lse` above, and `grad_lse` that
    of `lse`. `saved.grad_lse` is given only to kernels that support `differentiable_lse`; to others
    it comes inside of `out` and `grad_out`, see Note [Gradient of lse in columns] of
    `WidenedKernel`. `saved.lse` may be a view of any strides, and -inf in rows without keys only.

    Attributes:
        name: what users and `available_kernels` call it.
        has_segments: whether it takes launches with segments.
    """

    name: ClassVar[str]
    has_segments: ClassVar[bool] = False

    @abstractmethod
    def missing(self) -> str | None:
        """Why this kernel cannot run on this machine's current device, `None` if it can.

        Asked once for each device.
        """

    @abstractmethod
    def supports(self, problem: Problem) -> str | None:
        """Why this kernel cannot serve the problem, `None` if it can.

        A function of the problem alone: asked once for each, and all ranks must decide alike.
        """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        """`(out, lse)` of the queries over the keys of this launch."""

    @abstractmethod
    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        """Gradients of query, key and value from the scores of this launch."""
