"""PyTorch's own flash attention 2 for CUDA GPUs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import attention

from dtensor_ring.compute.kernels.gpu import gpu_limits, no_gpu, one_head_dim
from dtensor_ring.compute.kernels.kernel import Gradients, Problem, Result, Saved, Segments
from dtensor_ring.compute.kernels.varlen import Band, VarlenKernel, sizes

aten = torch.ops.aten

# Compute capabilities whose shared memory is too small for some gradients. The list is from
# PyTorch's `sdp_utils.cpp`, whose checks a direct call of the operator skips.
SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))


class CudaFlash(VarlenKernel):
    """`aten._flash_attention_forward`, with grouped-query, segments of any length and windows."""

    name = "cuda_flash"

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
        out, lse, *_ = aten._flash_attention_forward(
            *(q, k, v, *_lengths(q, k, band.segments), 0.0, band.is_causal, False), **_options(band)
        )
        return out, lse

    def attend_backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, band: Band
    ) -> Gradients:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's random state
        dq, dk, dv = aten._flash_attention_backward(
            *(saved.grad_out, q, k, v, saved.out, saved.lse, *_lengths(q, k, band.segments)),
            *(0.0, band.is_causal, unused, unused),
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
