"""Flash attention 3, the `flash_attn_interface` module that flash-attn's `hopper` folder builds."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from dtensor_ring.kernels.gpu import gpu_limits, no_gpu, one_head_dim
from dtensor_ring.kernels.kernel import Problem
from dtensor_ring.kernels.varlen import Band, VarlenKernel, lengths
from dtensor_ring.segments import Segments

flash = torch.ops.flash_attn_3


class FlashAttn3(VarlenKernel):
    """Flash attention 3 (Shah et al., 2024, arXiv 2407.08608) for Hopper GPUs.

    The signatures of the module's functions have changed, those of the operators that it registers
    have not: they are called, with names. Tensors are `(B, L, N, H)`, the diagonal is aligned
    bottom-right, and lse comes without splitting keys, which `num_splits` of 0 would decide on.
    """

    name = "flash_attn3"

    def missing(self) -> str | None:
        return no_gpu(9) or _missing_package()

    def supports(self, problem: Problem) -> str | None:
        if reason := gpu_limits(problem) or one_head_dim(problem, 256):
            return reason
        if problem.head_dim > 192 and _is_deterministic():
            return f"it has no deterministic gradients of a head dim of {problem.head_dim}"
        if problem.grouped and _is_deterministic():  # those wait for counters that nothing sets
            return "it has no deterministic gradients of grouped-query keys"
        return None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None, band: Band
    ) -> tuple[Tensor, Tensor]:
        more = {**lengths(segments, q.device), **_options(band)}
        out, lse, *_ = flash.fwd(q, k, v, num_splits=1, **more)
        return out, lse

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
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        flash.bwd(
            *(dout, q, k, v, out, lse, *grads),
            **lengths(segments, q.device),
            **_options(band),
            deterministic=_is_deterministic(),
        )
        return grads


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
    except Exception as error:  # one that is broken may raise what it likes
        return f"the module flash_attn_interface does not load: {error}"
    if not (hasattr(flash, "fwd") and hasattr(flash, "bwd")):
        return "this flash_attn_interface is too old: it registers no torch.ops.flash_attn_3"
    return None


def _options(band: Band) -> dict[str, object]:
    left, right = band.window
    return {
        "softmax_scale": band.scale,
        "is_causal": band.is_causal,
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
        "softcap": band.softcap,
    }
