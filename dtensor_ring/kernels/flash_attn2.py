"""The flash-attn package, version 2.7 or later."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from dtensor_ring.kernels.cuda_flash import bottom_right, flash2_limits, too_old_for_flash2
from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.mask import Mask


class FlashAttn2(Kernel):
    """Flash attention 2 (Dao, 2023, arXiv 2307.08691) from the flash-attn package, with softcap.

    Its tensors are `(B, L, N, H)` and its diagonal is aligned bottom-right.
    """

    name = "flash_attn2"

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        return too_old_for_flash2() or _missing_package()

    def supports(self, problem: Problem) -> str | None:
        return flash2_limits(problem)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse, *_ = _flash_attn_forward(
            *(q, k, v),
            **_options(mask, q.shape[1], k.shape[1], scale, softcap),
            return_softmax=False,
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
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(
            *(dout, q, k, v, o, lse.contiguous(), *grads),
            **_options(mask, q.shape[1], k.shape[1], scale, softcap),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        query_grad, key_grad, value_grad = (grad.transpose(1, 2) for grad in grads)
        return query_grad, key_grad, value_grad


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


def _options(mask: Mask, rows: int, cols: int, scale: float, softcap: float) -> dict[str, object]:
    left, right = bottom_right(mask, rows, cols)
    return {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": mask == Mask.causal(),
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
        "softcap": softcap,
        "alibi_slopes": None,
    }
