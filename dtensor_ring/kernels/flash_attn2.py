"""The flash-attn package, version 2.7 or later."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from dtensor_ring.kernels.gpu import gpu_limits, no_gpu, one_head_dim
from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.kernels.varlen import clear_blind_rows, longest
from dtensor_ring.kernels.window import Window, bottom_right, segments_window
from dtensor_ring.mask import Mask
from dtensor_ring.segments import Segments


class FlashAttn2(Kernel):
    """Flash attention 2 (Dao, 2023, arXiv 2307.08691) from the flash-attn package, with softcap.

    Its tensors are `(B, L, N, H)` and its diagonal is aligned bottom-right.
    """

    name = "flash_attn2"
    has_segments = True

    def missing(self) -> str | None:
        return no_gpu() or _missing_package()

    def supports(self, problem: Problem) -> str | None:
        return gpu_limits(problem) or one_head_dim(problem, 256)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        window = bottom_right(mask, q.shape[1], k.shape[1])
        out, lse, *_ = _flash_attn_forward(
            *(q, k, v), **_options(mask, window, scale, softcap), return_softmax=False
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
        from flash_attn.flash_attn_interface import _flash_attn_backward

        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        window = bottom_right(mask, q.shape[1], k.shape[1])
        _flash_attn_backward(
            *(dout, q, k, v, o, lse.contiguous(), dq, dk, dv),
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
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse, *_ = _flash_attn_varlen_forward(
            *(query, key, value, *segments.boundaries(query.device), *longest(segments)),
            **_options(segments.mask, segments_window(segments), scale, softcap),
            return_softmax=False,
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
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
        _flash_attn_varlen_backward(
            *(grad_out, query, key, value, out, lse.contiguous(), dq, dk, dv),
            *(*segments.boundaries(query.device), *longest(segments)),
            **_options(segments.mask, segments_window(segments), scale, softcap),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


@cache
def _missing_package() -> str | None:
    try:
        found = version("flash-attn")
        major, minor = map(int, found.split(".")[:2])
        if (major, minor) < (2, 7) or major > 2:
            return f"it needs flash-attn 2.7 or a later 2.x, found {found}"
        import_module("flash_attn.flash_attn_interface")
    except PackageNotFoundError:
        return "the flash-attn package is not installed"
    except ImportError as error:
        return f"the flash-attn package does not load: {error}"
    return None


def _options(mask: Mask, window: Window, scale: float, softcap: float) -> dict[str, object]:
    left, right = window
    return {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": mask == Mask.causal(),
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
        "softcap": softcap,
        "alibi_slopes": None,
    }
