"""The contracts between the ring and block kernels, and the limits that GPU kernels share."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from threading import Lock
from types import ModuleType
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.dropout import Dropout
from dtensor_ring.compute.lags import Lags
from dtensor_ring.compute.memory import Numbers, Region, part_of, parts_of
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import length


@dataclass(frozen=True, eq=False)
class Segments:
    """Boundaries of tiles that follow one another in queries and in keys.

    Segments cover all tokens of a launch. Queries that see nothing form a segment without keys, and
    keys that no query sees form a segment without queries.

    Attributes:
        rows: boundaries of the queries, ascending from 0 to the number of queries.
        cols: boundaries of the keys, likewise. S segments have S + 1 boundaries.
    """

    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @cached_property
    def max_rows(self) -> int:
        """Number of queries of the longest segment."""
        return max(end - start for start, end in pairwise(self.rows))

    @cached_property
    def max_cols(self) -> int:
        """Number of keys of the longest segment."""
        return max(end - start for start, end in pairwise(self.cols))

    @cached_property
    def has_empty_rows(self) -> bool:
        """Whether there are rows without keys."""
        pairs = zip(pairwise(self.rows), pairwise(self.cols), strict=True)
        return any(length(rows) and not length(cols) for rows, cols in pairs)

    @cached_property
    def has_empty_cols(self) -> bool:
        """Whether there are keys that no row sees."""
        return Segments(self.cols, self.rows).has_empty_rows

    def boundaries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `rows` and `cols` as int32 tensors on the device, see `Numbers`."""
        rows, cols = self._numbers.on(device)
        return rows, cols

    @cached_property
    def _numbers(self) -> Numbers:
        return Numbers(torch.int32, self.rows, self.cols)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield the queries and the keys of each segment that has both."""
        for rows, cols in zip(pairwise(self.rows), pairwise(self.cols), strict=True):
            if length(rows) and length(cols):
                yield slice(*rows), slice(*cols)


@dataclass(frozen=True, eq=False)
class Intervals:
    """The keys that each query of a launch sees: a mask as data.

    With `F = ends[b, :, i]`, query i of batch row b sees the keys `[0, F[0])`, `[F[1], F[2])`,
    `[F[3], F[4])` and so on. The numbers of a query never descend, so an interval may be empty.

    Attributes:
        ends: int32 `(B, F, R)`, F is odd. B is 1 if all batch rows see the same.
    """

    ends: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Memory of the numbers and of a copy on a device, in bytes."""
        return 1000 + 2 * self.ends.nbytes

    def on(self, device: torch.device) -> Tensor:
        """Return `ends` on a device, where it is copied once."""
        return self._numbers.on(device)[0]

    @cached_property
    def _numbers(self) -> Numbers:
        return Numbers(torch.int32, torch.from_numpy(self.ends))


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of a block kernel: a tile, segments, or all tiles of a step as intervals of keys.

    Segments are many tiles of one mask.

    Attributes:
        rows: region of the local queries `(B, N, L)`. With segments, a region of several batch rows
            has all their tokens.
        cols: region of the resident keys `(B, Nkv, C)`, likewise.
        mask: the band, in indices of the tile or of each segment; full with intervals.
        segments: boundaries of the tiles; `None` for a single tile.
        in_flight: whether messages are in flight during the launch and need multiprocessors.
        dropout: the weights that are dropped, `None` for none.
        lags: the positions of queries and keys, if queries have a bias by distance.
        by_block: whether the bits of a batch row and head must not depend on other ones, on
            strides, or on where the tensors are in memory, see `Kernel.bitwise_by_block`.
        intervals: the keys that each query sees, in place of the mask; `None` for a band.
    """

    rows: Region
    cols: Region
    mask: Mask
    segments: Segments | None = None
    in_flight: bool = False
    dropout: Dropout | None = None
    by_block: bool = False
    intervals: Intervals | None = None
    lags: Lags | None = None


class Scores(NamedTuple):
    """The score of a query and a key: `softcap * tanh(scale * q.k / softcap)`, or `scale * q.k`.

    A kernel reads `scale` and `softcap` only. The mask and the dropout of a launch are in its
    `Launch`, and sinks are added after the last merge.

    Attributes:
        mask: the keys that a query sees, in global positions.
        scale: factor of the products of query and key.
        softcap: bound of the scores (Gemma 2, 2024, arXiv 2408.00118); 0.0 means none.
        sinks: one learned logit for each query head `(N,)`.
        kernel: name of the block kernel; `None` takes the first that serves the problem.
        dropout_p: the probability that a weight is dropped after the softmax.
        dropout_seed: int64, `()`, with `dropout_p`, see Note [Counters].
        first: numbers of the first batch row and head of the tensors in the whole batch, which
            dropout counts; `None` for 0 and 0.
    """

    mask: Mask
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    kernel: str | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    first: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)  # not frozen: each call and each launch makes one
class Saved:
    """Outputs of some rows over all keys of the ring, and the gradients of these outputs.

    Attributes:
        grad_out: gradient of `out`, of the same shape.
        out: the attention's output `(B, N, R, Hv)`.
        lse: log-sum-exp of the scores of each row `(B, N, R)`, float32 or wider.
        grad_lse: gradient of `lse`, of the same shape; `None` if nothing uses `lse`.
    """

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None = None

    def region(self, rows: Region) -> Saved:
        """Return views of a region of the rows, or itself if the region is all of them."""
        grad_out, out, lse = parts_of(rows, (self.grad_out, self.out, self.lse))
        if grad_out is self.grad_out:
            return self
        grad_lse = None if self.grad_lse is None else part_of(self.grad_lse, rows)
        return Saved(grad_out, out, lse, grad_lse)


# PyTorch's setting for operations that are not deterministic: allow, warn, or refuse.
Determinism = Literal["off", "warn", "strict"]


def determinism() -> Determinism:
    """Return the current setting of `torch.use_deterministic_algorithms`.

    >>> determinism()
    'off'
    """
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "strict"


@dataclass(frozen=True, slots=True)
class Problem:
    """The facts that decide whether a kernel serves an attention; equal on ranks with equal GPUs.

    Attributes:
        device_type: type of the tensors' device, `"cpu"` or `"cuda"`.
        dtype: dtype of query, key and value.
        head_dim: head dim of query and key.
        value_head_dim: head dim of value and output.
        scale: factor of the scores.
        softcap: bound of the scores; 0.0 means none.
        differentiable_lse: whether backward gets a gradient of lse.
        windowed: whether tiles may have bands other than full and causal.
        grouped: whether there are fewer key heads than query heads.
        packed: whether the sequence has documents; then a step may have any number of tiles.
        dropout: whether weights are dropped.
        biased: whether queries have a bias by distance.
        by_block: whether launches are `by_block`.
        fleeting: whether each call has tiles of its own, as those to a cache have.
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
    dropout: bool = False
    by_block: bool = False
    fleeting: bool = False
    biased: bool = False
    determinism: Determinism = field(default_factory=determinism)
    capability: tuple[int, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.device_type == "cuda" and torch.cuda.is_available():
            # Read this here, so `supports` is a function of the problem only.
            object.__setattr__(self, "capability", torch.cuda.get_device_capability())


# `out` and `lse`.
Result = tuple[Tensor, Tensor]

# Gradients of query, key and value.
Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(ABC):
    """A block kernel: attention of some queries over some keys, forward and backward.

    This is the whole contract between the ring and a kernel. Letters: B batch, N query heads, Nkv
    key heads, R rows (queries), C columns (keys), H head dim, Hv head dim of values.

    **A tile** is a launch without segments. `q` is `(B, N, R, H)`, `k` `(B, Nkv, C, H)` and
    `v` `(B, Nkv, C, Hv)`. `out` is `(B, N, R, Hv)` and `lse` `(B, N, R)`.

    **Segments** are many tiles, one after the other in memory. Only a kernel that sets
    `has_segments` gets them. `q` is `(T, N, H)`, `k` `(U, Nkv, H)` and `v` `(U, Nkv, Hv)`, with all
    tokens of the launch's regions. `out` is `(T, N, Hv)` and `lse` `(N, T)`, heads first. Segment s
    has the queries from `segments.rows[s]` to `segments.rows[s + 1]`, and sees the keys from
    `segments.cols[s]` to `segments.cols[s + 1]`.

    **Intervals** are all tiles of a step, of all batch rows. Only a kernel that sets
    `has_intervals` gets them, and it gets tiles, too. Tensors have the shapes of a tile, and
    `launch.intervals` says which of the C keys each of the R queries sees.

    **Inputs** have any strides whose last is 1. N is a multiple of Nkv, and B, R, C are at least 1.
    A kernel must not write to its inputs.

    **Results** are fresh tensors, with a last stride of 1, that the caller may write to. `out` has
    the query's dtype, a gradient has the dtype of its tensor, and all are on the query's device.
    `lse` is the natural log-sum-exp of the scores, float32 or wider; float64 for float64 inputs.

    **The band** is `launch.mask`, in indices of the tile or of each segment: row i sees column j
    if and only if `i - left <= j <= i + right`, where `None` has no bound. In a tile, every row
    sees a column, and every column is seen by a row. A tile with a causal mask is square. So is
    every segment that has rows, columns and a mask that is not full. For squares, a diagonal
    aligned top-left is the same as one aligned bottom-right.

    Note [Windows aligned bottom-right]: a kernel that aligns the last row with the last column
    takes a tile's bounds as `left + C - R` and `right + R - C`. A trimmed tile has `R <= C + left`
    and `C <= R + right`, so neither becomes negative; kernels read a negative bound as unbounded.
    But flash attention 2 also reads a bound of C or more as unbounded, and then an unbounded right
    side as C columns past the diagonal. This hides keys from the first rows if R exceeds C and the
    right side has no bound, or one of C or more. So the planner cuts tiles: a tile with a bound on
    the left has no bound on the right only if `R <= C`; otherwise `right + R - C < C`.

    **Rows without keys** occur in segments, as a segment may have no columns, and in intervals.
    Such rows get an out of 0, an lse of -inf, and gradients of 0. Keys that no row sees get
    gradients of 0.

    **Backward** gets `out` and `lse` of the whole row, over all keys of the ring. With
    `p = exp(score - lse)` the gradient of a score is `p * (grad_out.v - sum(grad_out * out) +
    grad_lse)`, so the gradients of the tiles of a row add up (Dao et al., 2022, arXiv 2205.14135,
    appendix B.4). `saved` has the shapes of `out` and `lse` above, and `grad_lse` has that of
    `lse`. Only kernels that support `differentiable_lse` get `saved.grad_lse`. For others, extra
    columns of `out` and `grad_out` encode it, see Note [Gradient of lse in columns] of
    `WidenedKernel`. `saved.lse` may be a view of any strides; it is -inf only in rows without keys.

    **Dropout** is `launch.dropout`. Only a kernel that sets `has_dropout` gets it. It multiplies
    the weights of values by `launch.dropout.factors`, after lse, which it leaves as it is. In the
    formula above `grad_out.v` gets this factor, and so do the weights in the gradient of v.

    **A bias by distance** is what `q` has beside the head dim of `k`: with `q` `(B, N, R, H + E)`,
    number d of the last E is added to the score of the key that is d positions before the query,
    after the softcap. Keys after the query, and those E or more before it, get nothing.
    `launch.lags` has the positions. Only a kernel that sets `has_bias` gets such queries, in tiles.
    Their gradient has that of the bias in the same place: number d is the gradient of the score of
    the key d positions before.

    Attributes:
        name: the name in the `kernel` argument and in `available_kernels`.
        has_segments: whether the kernel takes launches with segments.
        has_intervals: whether the kernel takes launches with intervals.
        has_dropout: whether the kernel drops weights by the positions of the whole sequence.
        has_bias: whether the kernel adds a bias by distance to scores.
        bitwise_by_block: whether launches `by_block` are served: for tiles of the same shape, mask
            and content, a batch row and a key head with its queries get the same bits, whatever
            else is in the launch, and wherever the tensors are. Sums in a fixed order need it.
    """

    name: ClassVar[str]
    has_segments: ClassVar[bool] = False
    has_intervals: ClassVar[bool] = False
    has_dropout: ClassVar[bool] = False
    has_bias: ClassVar[bool] = False
    bitwise_by_block: ClassVar[bool] = False

    @abstractmethod
    def missing(self) -> str | None:
        """Return why this kernel cannot run on this machine's current device, or `None`.

        The result is cached for each device.
        """

    @abstractmethod
    def supports(self, problem: Problem) -> str | None:
        """Return why this kernel cannot serve the problem, or `None`.

        The result is cached. It must depend only on the problem, because all ranks must agree.
        """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        """Return `(out, lse)` of the queries over the keys of this launch."""

    @abstractmethod
    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        """Return the gradients of query, key and value from the scores of this launch."""


# The compiler of kernels in Python fails where two threads of a process compile at once.
COMPILER = Lock()


def no_gpu(*majors: int) -> str | None:
    """Return why the current GPU cannot run a kernel, or `None`.

    Args:
        majors: major compute capabilities that the kernel supports; by default 8 and later.
    """
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major in majors or (not majors and major >= 8):
        return None
    wanted = " or ".join(f"{wanted}.x" for wanted in majors) or "8.0"
    return f"it needs compute capability {wanted}, this GPU has {major}.{minor}"


def gpu_limits(problem: Problem) -> str | None:
    """Return why no GPU kernel serves the problem, or `None` if some may."""
    if problem.device_type != "cuda":
        return f"it runs on CUDA, the tensors are on {problem.device_type}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {problem.dtype}"
    # They take the maximum before scaling; it stays the maximum only under a positive scale.
    if problem.scale <= 0:
        return f"it needs a positive scale, got {problem.scale}"
    return "it has no gradient of lse" if problem.differentiable_lse else None


def one_head_dim(problem: Problem, largest: int) -> str | None:
    """Return why a kernel that needs one head dim up to `largest` cannot serve, or `None`."""
    if problem.head_dim != problem.value_head_dim:
        return (
            "it needs one head dim for query, key and value, "
            f"got {problem.head_dim} and {problem.value_head_dim}"
        )
    if problem.head_dim % 8 or problem.head_dim > largest:
        return (
            f"it needs a head dim that is a multiple of 8 up to {largest}, got {problem.head_dim}"
        )
    return None


def load(module: str) -> ModuleType:
    """Import a package of kernels and ignore its warnings."""
    with warnings.catch_warnings():
        # Under `-W error` a warning would keep the package from loading in this process.
        warnings.simplefilter("ignore")
        return import_module(module)


@dataclass(frozen=True, eq=False)
class Pages:
    """The blocks that each entry of a launch reads.

    Attributes:
        tables: indices of blocks `(E, P)`, int32. P is the number of blocks of the longest entry;
            shorter rows are padded with block 0.
        lengths: number of keys of each entry `(E,)`, int32, at least 1.
        block: number of keys of a block.
    """

    tables: np.ndarray
    lengths: np.ndarray
    block: int

    @cached_property
    def longest(self) -> int:
        """Number of keys of the longest entry."""
        return int(self.lengths.max())

    @cached_property
    def num_keys(self) -> int:
        """Number of keys of all entries."""
        return int(self.lengths.sum())

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `tables` and `lengths` on a device, where they are copied once."""
        tables, lengths = self._numbers.on(device)
        return tables, lengths

    @cached_property
    def _numbers(self) -> Numbers:
        return Numbers(torch.int32, torch.from_numpy(self.tables), torch.from_numpy(self.lengths))


class PagedKernel(ABC):
    """Attention of a few queries to keys in blocks, forward only.

    Letters: E entries, R queries of each, N query heads, Nkv key heads, H head dim, Hv head dim of
    values. There is no mask: every query of an entry sees every key of that entry.

    Attributes:
        name: the name that users pass.
        whole_blocks: whether it reads whole blocks only: lengths are then multiples of a block.
    """

    name: ClassVar[str]
    whole_blocks: ClassVar[bool] = False

    @abstractmethod
    def missing(self) -> str | None:
        """Return why this kernel cannot run on this machine's current device, or `None`."""

    @abstractmethod
    def supports(self, problem: Problem, block: int) -> str | None:
        """Return why this kernel cannot serve a problem with this block size, or `None`."""

    @abstractmethod
    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        """Return `(out, lse)` of each entry.

        Args:
            query: `(E, R, N, H)`, token-major, of any strides whose last is 1.
            key_blocks: `(num_blocks, block, Nkv, H)`, contiguous.
            value_blocks: `(num_blocks, block, Nkv, Hv)`, contiguous.
            pages: the blocks that each entry reads.
            scores: scale and softcap.

        Returns:
            Fresh tensors: `out` `(E, R, N, Hv)` in the query's dtype, and `lse` `(E, N, R)`, the
            natural log-sum-exp, float32 or wider.
        """


def whole_pages(block: int, multiple: int) -> str | None:
    """Return why a kernel that needs blocks of a multiple of keys refuses a size, or `None`."""
    if block % multiple == 0:
        return None
    return (
        f"it reads blocks of a multiple of {multiple} keys, got {block}; make the pool with "
        f"block={-(-block // multiple) * multiple}"
    )
