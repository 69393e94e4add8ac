"""The base of flash attention kernels: tensors are token-major, segments have any length."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import (
    Gradients,
    Kernel,
    Launch,
    PagedKernel,
    Result,
    Saved,
    Scores,
    Segments,
)
from dtensor_ring.planning.mask import Mask

# The number of columns that a row sees left and right of its own; `None` means all.
Window = tuple[int | None, int | None]


def bottom_right(mask: Mask, rows: int, cols: int) -> Window:
    """Return `window_size` of a tile for a kernel that aligns last row and last column.

    Neither bound is negative: see Note [Windows aligned bottom-right] of `Kernel`.

    >>> bottom_right(Mask(2, 1), 9, 8), bottom_right(Mask.causal(), 7, 7)
    ((1, 2), (None, None))
    """
    if mask == Mask.causal():
        return None, None  # the causal flag implies the window
    left = None if mask.left is None else mask.left + cols - rows
    right = None if mask.right is None else mask.right - cols + rows
    assert left is None or right is not None or rows <= cols, f"{rows} x {cols} with {mask}"
    assert right is None or right < cols, f"{rows} x {cols} with {mask}"
    return left, right


def window_of(launch: Launch, rows: int, cols: int) -> Window:
    """Return `window_size` of a launch with `rows` queries and `cols` keys."""
    if launch.segments is None:
        return bottom_right(launch.mask, rows, cols)
    # Segments with a band are square, so both alignments of the diagonal are the same.
    mask = launch.mask
    return (None, None) if mask == Mask.causal() else (mask.left, mask.right)


class Band(NamedTuple):
    """The options of a launch that a flash attention function takes in addition to tensors.

    Attributes:
        is_causal: whether the mask is causal; then `window` has no bounds.
        window: bounds, aligned bottom-right.
        scale: factor of the scores.
        softcap: bound of the scores; 0.0 means none.
        segments: boundaries of the tiles; `None` for a single tile.
        in_flight: whether messages are in flight during the launch.
    """

    is_causal: bool
    window: Window
    scale: float
    softcap: float
    segments: Segments | None
    in_flight: bool = False


class VarlenKernel(Kernel):
    """A kernel of token-major tensors whose diagonal is aligned bottom-right.

    Subclasses call their function in `attend` and `attend_backward`. There, tensors of a tile are
    `(B, L, N, H)`, those of segments `(T, N, H)`, and lse is `(B, N, L)` or `(N, T)`.

    Attributes:
        fills_empty_rows: whether the function writes zeros to the outputs of rows without keys.
        paged: the kernel of the same package that reads keys through block tables, if any.
    """

    has_segments = True
    fills_empty_rows: ClassVar[bool] = True
    paged: ClassVar[PagedKernel | None] = None

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Result:
        """Return `out`, in the layout of the query, and `lse`."""

    @abstractmethod
    def attend_backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, band: Band
    ) -> Gradients:
        """Return gradients in the layout of query, key and value; `saved.lse` is contiguous."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        q, k, v = (_token_major(x, launch) for x in (q, k, v))
        out, lse = self.attend(q, k, v, _band(q, k, launch, scores))
        if launch.segments is not None:
            return clear_empty_rows(out, lse, launch.segments, not self.fills_empty_rows)
        return _token_major(out, launch), lse

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        dout, out, q, k, v = (_token_major(x, launch) for x in (saved.grad_out, saved.out, q, k, v))
        # `saved.lse` may be a view, but these functions read it as dense memory.
        saved = Saved(dout, out, saved.lse.contiguous())
        dq, dk, dv = self.attend_backward(saved, q, k, v, _band(q, k, launch, scores))
        return _token_major(dq, launch), _token_major(dk, launch), _token_major(dv, launch)


def _token_major(x: Tensor, launch: Launch) -> Tensor:
    """Swap heads and tokens of a tile; segments are token-major already."""
    return x if launch.segments is not None else x.transpose(1, 2)


def _band(q: Tensor, k: Tensor, launch: Launch, scores: Scores) -> Band:
    window = window_of(launch, q.shape[1], k.shape[1])
    is_causal = launch.mask == Mask.causal()
    return Band(is_causal, window, scores.scale, scores.softcap, launch.segments, launch.in_flight)


# Note [Segments without keys or without rows]: `Kernel` defines what a launch must return for them.
# All four flash attention kernels handle both, but differently. Their code shows:
#
# - Rows without keys, forward: flash attention 2, in flash-attn and in PyTorch, writes an out of 0
#   and an lse of +inf. Flash attention 3 writes an out of 0 and an lse of -inf. Flash attention 4
#   masks a whole block: its lse is -inf, and its out is 0 times the values of the segment before,
#   which is NaN if those are not finite. If a row has no keys, `clear_empty_rows` then writes an
#   lse of -inf, and for flash attention 4 also an out of 0.
# - Rows without keys, backward: no block of keys reads them. All kernels clear the gradient of
#   queries in an earlier launch, which covers queries only. In flash attention 3 and 4 this launch
#   reads lse, and treats -inf as 0. Flash attention 2 reads lse only together with keys. So the
#   -inf of rows without keys enters no arithmetic.
# - Keys without rows, backward: a block that no row sees writes zeros to its gradients, or adds
#   nothing to zeros.
def clear_empty_rows(
    out: Tensor, lse: Tensor, segments: Segments, fill: bool
) -> tuple[Tensor, Tensor]:
    """Set rows without keys to (0, -inf) in `out` `(T, N, Hv)` and `lse` `(N, T)`, in place.

    Without `fill` the outputs are 0 already, and only `lse`, which is far smaller, is written.
    """
    if segments.has_empty_rows:
        rows, cols = segments.boundaries(out.device)
        has_no_keys = without_partners(rows, cols, out.shape[0])
        if fill:
            # An lse of -inf gives them no weight in a merge, but 0 times NaN would still be NaN.
            out.masked_fill_(has_no_keys.view(-1, 1, 1), 0)
        lse.masked_fill_(has_no_keys, -torch.inf)
    return out, lse


def without_partners(own: Tensor, other: Tensor, num_tokens: int) -> Tensor:
    """Return which tokens of a side are in segments that have nothing on the other side.

    Args:
        own: boundaries of the segments on the side of the tokens.
        other: those on the other side.
        num_tokens: all tokens of the side.
    """
    # Without `output_size` the host would wait for the device.
    return (other.diff() == 0).repeat_interleave(own.diff(), output_size=num_tokens)


def sizes(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Return boundaries of queries and keys, and the longest length of each (queries: >= 2)."""
    # If the longest segment has one row, flash attention 2 folds the heads of grouped-query into
    # rows, which fails for a segment without rows.
    return *segments.boundaries(device), max(2, segments.max_rows), segments.max_cols


def lengths(segments: Segments | None, device: torch.device) -> dict[str, object]:
    """Return `sizes` as arguments of flash attention 3 and 4; empty without segments."""
    if segments is None:
        return {}
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, sizes(segments, device), strict=True))
