"""Kernels of variable length: how they are called, and what they leave to do around a launch.

Note [Segments without keys or without rows]: the code of all four kernels provides for both, but
each in its own way. Read there:

- Rows without keys, forward: flash attention 2, in flash-attn and in PyTorch, writes out 0 and lse
  +inf, flash attention 3 out 0 and lse -inf. Flash attention 4 masks a whole block: lse -inf, and
  out 0 times the values of whatever segment lies before, which is NaN if those are not finite.
  `clear_blind_rows` writes (0, -inf) after all of them, and launches nothing if no row is blind.
- Rows without keys, backward: no block of keys reads them. All of them clear the sum of the
  gradient of queries in the launch before, which goes over queries only. That one looks at lse in
  flash attention 3 and 4, which take -inf for 0; flash attention 2 reads lse beside keys only. So
  the -inf of such rows meets no other number.
- Keys without rows, backward: a block that no row sees writes zeros to its gradients, or adds
  nothing to zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.kernels.kernel import Kernel
from dtensor_ring.kernels.window import Window, bottom_right, segments_window
from dtensor_ring.mask import Mask
from dtensor_ring.segments import Segments


class Band(NamedTuple):
    """What a launch sees, and how it scores: bounds are aligned bottom-right."""

    is_causal: bool
    window: Window
    scale: float
    softcap: float


class VarlenKernel(Kernel):
    """A kernel of token-major tensors, `(B, L, N, H)` or, with segments, `(T, N, H)`.

    Its diagonal is aligned bottom-right.
    """

    has_segments = True

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None, band: Band
    ) -> tuple[Tensor, Tensor]:
        """`out` as the query, and `lse` `(B, N, L)` or `(N, T)`."""

    @abstractmethod
    def pull_back(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments | None,
        band: Band,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients as query, key and value; `lse` is contiguous."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        window = bottom_right(mask, q.shape[1], k.shape[1])
        band = Band(mask == Mask.causal(), window, scale, softcap)
        out, lse = self.attend(q, k, v, None, band)
        return out.transpose(1, 2), lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None,
        mask: Mask,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        window = bottom_right(mask, q.shape[1], k.shape[1])
        band = Band(mask == Mask.causal(), window, scale, softcap)
        dq, dk, dv = self.pull_back(dout, q, k, v, o, lse.contiguous(), None, band)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def forward_segments(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        band = _segments_band(segments, scale, softcap)
        out, lse = self.attend(query, key, value, segments, band)
        return clear_blind_rows(out, lse, segments)

    def backward_segments(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        saved = out, lse.contiguous()
        band = _segments_band(segments, scale, softcap)
        return self.pull_back(grad_out, query, key, value, *saved, segments, band)


def _segments_band(segments: Segments, scale: float, softcap: float) -> Band:
    is_causal = segments.mask == Mask.causal()
    return Band(is_causal, segments_window(segments), scale, softcap)


def clear_blind_rows(out: Tensor, lse: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """`out` `(T, N, Hv)` and `lse` `(N, T)`, of which rows without keys become (0, -inf)."""
    if segments.has_blind_rows:
        rows, cols = segments.boundaries(out.device)
        blind = (cols.diff() == 0).repeat_interleave(rows.diff(), output_size=out.shape[0])
        out.masked_fill_(blind.view(-1, 1, 1), 0)
        lse.masked_fill_(blind, -torch.inf)
    return out, lse


def sizes(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Boundaries of both sides, then rows and columns of the longest segment, at least 2 rows.

    For a longest of one row, flash attention 2 folds the heads of grouped-query into rows, and
    takes for granted that no segment is without rows.
    """
    return *segments.boundaries(device), max(2, segments.max_rows), segments.max_cols


def lengths(segments: Segments | None, device: torch.device) -> dict[str, object]:
    """As flash attention 3 and 4 call them; nothing without segments."""
    if segments is None:
        return {}
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, sizes(segments, device), strict=True))
