"""Flash attention 4, the flash-attn-4 package, whose module is `flash_attn.cute`."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from dtensor_ring.kernels.gpu import gpu_limits, no_gpu, one_head_dim
from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.kernels.varlen import clear_blind_rows, lengths
from dtensor_ring.kernels.window import Window, bottom_right, segments_window
from dtensor_ring.mask import Mask
from dtensor_ring.segments import Segments

OLDEST_BETA = 28
"""Of version 4.0.0: those before have no gradient of a softcap."""

LATENT = (192, 128)
"""Head dims of query and value in multi-head latent attention, which has kernels of its own."""


class FlashAttn4(Kernel):
    """Flash attention 4, written in Python for Hopper and Blackwell and compiled at first use.

    Its tensors are `(B, L, N, H)`, its diagonal is aligned bottom-right, and `None` is an unbounded
    side. Head dims are those that both kinds of GPU have forward and backward, with softcap: on
    Hopper, the gradients of grouped-query are for one head dim only.
    """

    name = "flash_attn4"
    has_segments = True

    def missing(self) -> str | None:
        return no_gpu(9, 10) or _missing_package()

    def supports(self, problem: Problem) -> str | None:
        if (problem.head_dim, problem.value_head_dim) == LATENT:
            grouped = "it takes head dims of 192 and 128 without grouped-query only"
            return gpu_limits(problem) or (grouped if problem.grouped else None)
        return gpu_limits(problem) or one_head_dim(problem, 128)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        window = bottom_right(mask, q.shape[1], k.shape[1])
        out, lse, *_ = _flash_attn_fwd(
            q, k, v, return_lse=True, **_options(mask, window, scale, softcap)
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
        from flash_attn.cute.interface import _flash_attn_bwd

        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        window = bottom_right(mask, q.shape[1], k.shape[1])
        dq, dk, dv, *_ = _flash_attn_bwd(
            *(q, k, v, o, dout, lse.contiguous()),
            **_options(mask, window, scale, softcap),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
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
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(
            *(query, key, value),
            **lengths(segments, query.device),
            **_options(segments.mask, segments_window(segments), scale, softcap),
            return_lse=True,
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
        from flash_attn.cute.interface import _flash_attn_bwd

        dq, dk, dv, *_ = _flash_attn_bwd(
            *(query, key, value, out, grad_out, lse.contiguous()),
            **lengths(segments, query.device),
            **_options(segments.mask, segments_window(segments), scale, softcap),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


@cache
def _missing_package() -> str | None:
    try:
        found = version("flash-attn-4")
        beta = re.match(r"4\.0\.0b(\d+)", found)
        is_old = beta is not None and int(beta[1]) < OLDEST_BETA
        if is_old or not found.startswith("4."):
            return f"it needs flash-attn-4 4.0.0b{OLDEST_BETA} or a later 4.x, found {found}"
        import_module("flash_attn.cute.interface")
    except PackageNotFoundError:
        return "the flash-attn-4 package is not installed"
    except ImportError as error:
        return f"the flash-attn-4 package does not load: {error}"
    return None


def _options(mask: Mask, window: Window, scale: float, softcap: float) -> dict[str, object]:
    return {
        "softmax_scale": scale,
        "causal": mask == Mask.causal(),
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": softcap,
    }
