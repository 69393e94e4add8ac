"""The flash-attn package, version 2.7 or later."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from dtensor_ring.kernels.gpu import gpu_limits, no_gpu, one_head_dim
from dtensor_ring.kernels.kernel import Problem
from dtensor_ring.kernels.varlen import Band, VarlenKernel, sizes
from dtensor_ring.segments import Segments


class FlashAttn2(VarlenKernel):
    """Flash attention 2 (Dao, 2023, arXiv 2307.08691) from the flash-attn package, with softcap."""

    name = "flash_attn2"

    def missing(self) -> str | None:
        return no_gpu() or _missing_package()

    def supports(self, problem: Problem) -> str | None:
        return gpu_limits(problem) or one_head_dim(problem, 256)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None, band: Band
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward

        more = {**_options(band), "return_softmax": False}
        if segments is None:
            out, lse, *_ = _flash_attn_forward(q, k, v, **more)
        else:
            out, lse, *_ = _flash_attn_varlen_forward(q, k, v, *sizes(segments, q.device), **more)
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
        from flash_attn.flash_attn_interface import (
            _flash_attn_backward,
            _flash_attn_varlen_backward,
        )

        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = dout, q, k, v, out, lse, *grads
        more = {
            **_options(band),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if segments is None:
            _flash_attn_backward(*tensors, **more)
        else:
            _flash_attn_varlen_backward(*tensors, *sizes(segments, q.device), **more)
        return grads


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
    except Exception as error:  # one that is broken may raise what it likes
        return f"the flash-attn package does not load: {error}"
    return None


def _options(band: Band) -> dict[str, object]:
    left, right = band.window
    return {
        "dropout_p": 0.0,
        "softmax_scale": band.scale,
        "causal": band.is_causal,
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
        "softcap": band.softcap,
        "alibi_slopes": None,
    }
