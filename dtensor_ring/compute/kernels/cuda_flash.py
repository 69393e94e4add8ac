"""PyTorch's own flash attention 2 for CUDA GPUs."""

from __future__ import annotations

from inspect import signature

import torch
from torch import Tensor
from torch.nn import attention

from dtensor_ring.compute.kernels.kernel import (
    Gradients,
    PagedKernel,
    Pages,
    Problem,
    Result,
    Saved,
    Scores,
    Segments,
    gpu_limits,
    no_gpu,
    one_head_dim,
    whole_pages,
)
from dtensor_ring.compute.kernels.varlen import Band, VarlenKernel, sizes

aten = torch.ops.aten


class VarlenAttn(PagedKernel):
    """Calls `torch.nn.attention.varlen.varlen_attn` with block tables, from PyTorch 2.13 on."""

    name = "varlen_attn"

    def missing(self) -> str | None:
        return no_gpu() or _missing_argument()

    def supports(self, problem: Problem, block: int) -> str | None:
        # These are the limits of flash attention 2, PyTorch's default implementation.
        if reason := gpu_limits(problem) or one_head_dim(problem, 256) or whole_pages(block, 256):
            return reason
        return "it has no softcap" if problem.softcap else None

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        entries, num_rows, heads, _ = query.shape
        tables, lengths = pages.on(query.device)
        rows = torch.arange(entries + 1, dtype=torch.int32, device=query.device) * num_rows
        out, lse = varlen_attn(
            query.flatten(0, 1),
            key_blocks,
            value_blocks,
            cu_seq_q=rows,
            cu_seq_k=_boundaries(lengths),
            max_q=num_rows,
            max_k=pages.longest,
            return_aux=AuxRequest(lse=True),
            scale=scores.scale,
            enable_gqa=heads != key_blocks.shape[2],
            seqused_k=lengths,
            block_table=tables,
            # One split of keys: with several, flash attention 2 mixes up partial results of packed
            # rows, Dao-AILab/flash-attention#2812.
            num_splits=1,
        )
        lse = lse.unflatten(1, (entries, num_rows)).transpose(0, 1)
        return out.unflatten(0, (entries, num_rows)), lse


# Compute capabilities whose shared memory is too small for some gradients. The list is from
# PyTorch's `sdp_utils.cpp`, whose checks a direct call of the operator skips.
SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))


class CudaFlash(VarlenKernel):
    """`aten._flash_attention_forward`, with grouped-query, segments of any length and windows."""

    name = "cuda_flash"
    paged = VarlenAttn()

    def missing(self) -> str | None:
        if torch.cuda.is_available() and not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch was built without flash attention"
        return no_gpu() or _replaced()

    def supports(self, problem: Problem) -> str | None:
        if reason := gpu_limits(problem) or one_head_dim(problem, 256):
            return reason
        if problem.capability in SMALL and 192 < problem.head_dim <= 224:
            return f"it has no gradients of head dims 193 to 224 here, got {problem.head_dim}"
        return "it has no softcap" if problem.softcap else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Result:
        rows, cols, max_rows, max_cols = _lengths(q, k, band.segments)
        out, lse, *_ = aten._flash_attention_forward.default(
            q, k, v, rows, cols, max_rows, max_cols, 0.0, band.is_causal, False, **_options(band)
        )
        return out, lse

    def attend_backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, band: Band
    ) -> Gradients:
        rows, cols, max_rows, max_cols = _lengths(q, k, band.segments)
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's random state
        dq, dk, dv = aten._flash_attention_backward.default(
            saved.grad_out,
            q,
            k,
            v,
            saved.out,
            saved.lse,
            rows,
            cols,
            max_rows,
            max_cols,
            0.0,  # no dropout
            band.is_causal,
            unused,
            unused,
            **_options(band),
        )
        return dq, dk, dv


def _replaced() -> str | None:
    """Return why the operators are not those of flash attention 2, or `None`."""
    active = getattr(attention, "current_flash_attention_impl", lambda: None)()
    if active in (None, "FA2"):
        return None
    # The limits of other implementations differ, and they may split keys.
    return (
        f"activate_flash_attention_impl({active!r}) has replaced its operators; call "
        "torch.nn.attention.restore_flash_attention_impl()"
    )


def _lengths(q: Tensor, k: Tensor, segments: Segments | None) -> tuple[object, ...]:
    """Return the boundaries of queries and keys, and the longest length of each."""
    if segments is None:
        return None, None, q.shape[1], k.shape[1]
    return sizes(segments, q.device)


def _options(band: Band) -> dict[str, float | None]:
    # This operator takes None for an unbounded side.
    left, right = band.window
    return {"scale": band.scale, "window_size_left": left, "window_size_right": right}


def _boundaries(lengths: Tensor) -> Tensor | None:
    """Return the boundaries of the keys as if they were packed, or `None`."""
    # Flash attention 2 needs boundaries of both sides, but reads the lengths; 3 and 4 refuse them.
    if attention.current_flash_attention_impl() not in (None, "FA2"):
        return None
    zero = lengths.new_zeros(1)
    return torch.cat([zero, lengths.cumsum(0, dtype=torch.int32)])


def _missing_argument() -> str | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return f"this PyTorch has no varlen_attn: {error}"
    if {"seqused_k", "block_table", "num_splits"} <= set(signature(varlen_attn).parameters):
        return None
    return "varlen_attn of this PyTorch reads no block tables, 2.13 and later do"
