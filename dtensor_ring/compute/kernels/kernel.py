"""The contract between the ring and a block kernel, and the values that pass between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.memory import Numbers, Region, part_of
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import length


@dataclass(frozen=True, eq=False)
class Segments:
    """Boundaries of tiles, one after the other on both sides.

    They cover all tokens of a launch. Queries that see nothing are a segment without keys,
    and keys that nobody sees are one without queries.

    Attributes:
        rows: boundaries of the queries, ascending from 0 to their number.
        cols: boundaries of the keys that they see; both have one entry more than segments.
    """

    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @cached_property
    def max_rows(self) -> int:
        """Queries of the longest segment."""
        return max(end - start for start, end in pairwise(self.rows))

    @cached_property
    def max_cols(self) -> int:
        """Keys of the longest segment."""
        return max(end - start for start, end in pairwise(self.cols))

    @cached_property
    def has_empty_rows(self) -> bool:
        """Whether there are rows without keys."""
        pairs = zip(pairwise(self.rows), pairwise(self.cols), strict=True)
        return any(length(rows) and not length(cols) for rows, cols in pairs)

    def boundaries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`rows` and `cols` as int32 tensors on the device, see `Numbers`."""
        rows, cols = self._numbers.on(device)
        return rows, cols

    @cached_property
    def _numbers(self) -> Numbers:
        return Numbers(torch.int32, self.rows, self.cols)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each segment that has both."""
        for rows, cols in zip(pairwise(self.rows), pairwise(self.cols), strict=True):
            if length(rows) and length(cols):
                yield slice(*rows), slice(*cols)


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of a block kernel: a tile, or segments, which are many tiles of one mask.

    Attributes:
        rows: region of the local queries `(B, N, L)`; of several batch rows with segments, all
            tokens.
        cols: region of the resident keys `(B, Nkv, C)`, likewise.
        mask: the band, in indices of the tile or of each segment.
        segments: boundaries of the tiles; `None` for a single tile.
        in_flight: whether messages are in flight meanwhile, whose kernels want multiprocessors.
    """

    rows: Region
    cols: Region
    mask: Mask
    segments: Segments | None = None
    in_flight: bool = False


class Scores(NamedTuple):
    """How a query scores a key: `softcap * tanh(scale * q.k / softcap)`, or `scale * q.k`.

    A kernel reads `scale` and `softcap` only. The mask of a launch is in its `Launch`, and sinks
    are added after the last merge.

    Attributes:
        mask: what a query sees, in global positions.
        scale: factor of the products.
        softcap: bound of the scores (Gemma 2, 2024, arXiv 2408.00118); 0.0 means none.
        sinks: one learned logit for each query head `(N,)`.
        kernel: name of the block kernel; `None` takes the first that can.
    """

    mask: Mask
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    kernel: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """Outputs and their gradients of some rows, over all keys of the ring, not only a launch's.

    Attributes:
        grad_out: gradient of `out`.
        out: the attention's output `(B, N, R, Hv)`.
        lse: log-sum-exp of the scores of each row `(B, N, R)`, float32 or wider.
        grad_lse: gradient of `lse`, and of its shape; `None` where nothing uses `lse`.
    """

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None = None

    def at(self, rows: Region) -> Saved:
        """The same of a region of the rows, as views."""
        grad_out, out, lse = (part_of(x, rows) for x in (self.grad_out, self.out, self.lse))
        grad_lse = None if self.grad_lse is None else part_of(self.grad_lse, rows)
        return Saved(grad_out, out, lse, grad_lse)


Determinism = Literal["off", "warn", "strict"]
"""PyTorch's setting for operations that are not deterministic: allowed, warned of, or refused."""


def determinism() -> Determinism:
    """The current setting of `torch.use_deterministic_algorithms`.

    >>> determinism()
    'off'
    """
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "strict"


@dataclass(frozen=True, slots=True)
class Problem:
    """All that decides whether a kernel can serve an attention; equal on ranks with equal GPUs.

    Attributes:
        device_type: type of the tensors' device, `"cpu"` or `"cuda"`.
        dtype: of query, key and value.
        head_dim: of query and key.
        value_head_dim: of value and output.
        scale: factor of the scores.
        softcap: bound of the scores; 0.0 means none.
        differentiable_lse: whether backward gets a gradient of lse.
        windowed: whether tiles may have other bands than full and causal ones.
        grouped: whether there are fewer heads of keys than of queries.
        packed: whether there are documents, so that a step may have any number of tiles.
        determinism: PyTorch's setting, by default the current one.
        capability: compute capability of the current GPU, `None` for tensors on a CPU.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    scale: float = 1.0
    softcap: float = 0.0
    differentiable_lse: bool = False
    windowed: bool = False
    grouped: bool = False
    packed: bool = False
    determinism: Determinism = field(default_factory=determinism)
    capability: tuple[int, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.device_type == "cuda" and torch.cuda.is_available():
            # Read here, so that what kernels support is a function of this value alone.
            object.__setattr__(self, "capability", torch.cuda.get_device_capability())


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
