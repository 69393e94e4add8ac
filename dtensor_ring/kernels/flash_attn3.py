"""Flash attention 3, the `flash_attn_interface` module that flash-attn's `hopper` folder builds."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from dtensor_ring.kernels.gpu import gpu_limits, no_gpu, one_head_dim
from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.kernels.varlen import clear_blind_rows, lengths
from dtensor_ring.kernels.window import Window, bottom_right, segments_window
from dtensor_ring.mask import Mask
from dtensor_ring.segments import Segments

flash = torch.ops.flash_attn_3


class FlashAttn3(Kernel):
    """Flash attention 3 (Shah et al., 2024, arXiv 2407.08608) for Hopper GPUs.

    The signatures of the module's functions have changed, those of the operators that it registers
    have not: they are called, with names. Tensors are `(B, L, N, H)`, the diagonal is aligned
    bottom-right, and lse comes without splitting keys, which `num_splits` of 0 would decide on.
    """

    name = "flash_attn3"
    has_segments = True

    def missing(self) -> str | None:
        return no_gpu(9) or _missing_package()

    def supports(self, problem: Problem) -> str | None:
        reason = gpu_limits(problem) or one_head_dim(problem, 256)
        if reason is None and problem.head_dim > 192 and _is_deterministic():
            return f"it has no deterministic gradients of a head dim of {problem.head_dim}"
        return reason

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        window = bottom_right(mask, q.shape[1], k.shape[1])
        out, lse, *_ = flash.fwd(q, k, v, num_splits=1, **_options(mask, window, scale, softcap))
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
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        window = bottom_right(mask, q.shape[1], k.shape[1])
        flash.bwd(
            *(dout, q, k, v, o, lse.contiguous(), dq, dk, dv),
            **_options(mask, window, scale, softcap),
            deterministic=_is_deterministic(),
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
        out, lse, *_ = flash.fwd(
            *(query, key, value),
            **lengths(segments, query.device),
            **_options(segments.mask, segments_window(segments), scale, softcap),
            num_splits=1,
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
        dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
        flash.bwd(
            *(grad_out, query, key, value, out, lse.contiguous(), dq, dk, dv),
            **lengths(segments, query.device),
            **_options(segments.mask, segments_window(segments), scale, softcap),
            deterministic=_is_deterministic(),
        )
        return dq, dk, dv


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


@cache
def _missing_package() -> str | None:
    try:
        import_module("flash_attn_interface")
    except ModuleNotFoundError as error:
        if error.name == "flash_attn_interface":
            return "flash attention 3, the module flash_attn_interface, is not installed"
        return f"the module flash_attn_interface does not load: {error}"
    except ImportError as error:
        return f"the module flash_attn_interface does not load: {error}"
    if not (hasattr(flash, "fwd") and hasattr(flash, "bwd")):
        return "this flash_attn_interface is too old: it registers no torch.ops.flash_attn_3"
    return None


def _options(mask: Mask, window: Window, scale: float, softcap: float) -> dict[str, object]:
    left, right = window
    return {
        "softmax_scale": scale,
        "is_causal": mask == Mask.causal(),
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
        "softcap": softcap,
    }
