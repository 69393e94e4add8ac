"""PyTorch's own flash attention 2 for CUDA GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.kernels.gpu import gpu_limits, no_gpu, one_head_dim
from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.kernels.varlen import clear_blind_rows, longest
from dtensor_ring.kernels.window import Window, bottom_right, segments_window
from dtensor_ring.mask import Mask
from dtensor_ring.segments import Segments

aten = torch.ops.aten


class CudaFlash(Kernel):
    """`aten._flash_attention_forward`: grouped-query, differing lengths and windows.

    Its tensors are `(B, L, N, H)` and its diagonal is aligned bottom-right.
    """

    name = "cuda_flash"
    has_segments = True

    def missing(self) -> str | None:
        if torch.cuda.is_available() and not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch was built without flash attention"
        return no_gpu()

    def supports(self, problem: Problem) -> str | None:
        reason = gpu_limits(problem) or one_head_dim(problem, 256)
        return reason or ("it has no softcap" if problem.softcap else None)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        rows, cols = q.shape[1], k.shape[1]
        out, lse, *_ = aten._flash_attention_forward(
            *(q, k, v, None, None, rows, cols, 0.0, mask == Mask.causal(), False),
            **_options(bottom_right(mask, rows, cols), scale),
        )
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
        tensors = [x.transpose(1, 2) for x in (grad_out, query, key, value, out)]
        rows, cols = query.shape[2], key.shape[2]
        grads = aten._flash_attention_backward(
            *(*tensors, lse.contiguous(), None, None, rows, cols, 0.0, mask == Mask.causal()),
            *_no_dropout(query),
            **_options(bottom_right(mask, rows, cols), scale),
        )
        query_grad, key_grad, value_grad = (grad.transpose(1, 2) for grad in grads)
        return query_grad, key_grad, value_grad

    def forward_segments(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            *(query, key, value, *segments.boundaries(query.device), *longest(segments)),
            *(0.0, segments.mask == Mask.causal(), False),
            **_options(segments_window(segments), scale),
        )
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
        query_grad, key_grad, value_grad = aten._flash_attention_backward(
            *(grad_out, query, key, value, out, lse.contiguous()),
            *(*segments.boundaries(query.device), *longest(segments)),
            *(0.0, segments.mask == Mask.causal(), *_no_dropout(query)),
            **_options(segments_window(segments), scale),
        )
        return query_grad, key_grad, value_grad


def _no_dropout(query: Tensor) -> tuple[Tensor, Tensor]:
    """A random state, which nothing reads."""
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)
    return unused, unused


def _options(window: Window, scale: float) -> dict[str, float | None]:
    return {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
