"""Flash attention 3, the `flash_attn_interface` module that flash-attn's `hopper` folder builds."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.gpu import gpu_limits, load, no_gpu, one_head_dim
from dtensor_ring.compute.kernels.kernel import Gradients, Result
from dtensor_ring.compute.kernels.paged import PagedKernel, Pages
from dtensor_ring.compute.kernels.problem import Problem
from dtensor_ring.compute.kernels.saved import Saved
from dtensor_ring.compute.kernels.scores import Scores
from dtensor_ring.compute.kernels.varlen import Band, VarlenKernel, lengths

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
        is_deterministic = problem.determinism != "off"
        if problem.head_dim > 192 and is_deterministic:
            return f"it has no deterministic gradients of a head dim of {problem.head_dim}"
        if problem.grouped and is_deterministic:
            # Those wait for counters that builds before September 2025 do not set: they hang.
            return (
                "deterministic gradients of grouped-query keys hang in builds before September "
                "2025, which cannot be told from later ones"
            )
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Result:
        more = {**lengths(band.segments, q.device), **_options(band)}
        # Keys in one split: with 0 it might choose several, whose lse are apart.
        out, lse, *_ = flash.fwd(q, k, v, num_splits=1, **more)
        return out, lse

    def attend_backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, band: Band
    ) -> Gradients:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        flash.bwd(
            *(saved.grad_out, q, k, v, saved.out, saved.lse, *grads),
            **lengths(band.segments, q.device),
            **_options(band),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads


class PagedFlashAttn3(PagedKernel):
    """The forward operator over page tables, with pages of any size."""

    name = "flash_attn3"

    def missing(self) -> str | None:
        return no_gpu(9) or _missing_package()

    def supports(self, problem: Problem, block: int) -> str | None:
        return gpu_limits(problem) or one_head_dim(problem, 256)

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        tables, lengths = pages.on(query.device)
        # Few queries leave most of a GPU idle, so it may split the keys; it merges them itself.
        out, lse, *_ = flash.fwd(
            *(query, key_blocks, value_blocks),
            page_table=tables,
            seqused_k=lengths,
            softmax_scale=scores.scale,
            softcap=scores.softcap,
            num_splits=0,
        )
        return out, lse


def _missing_package() -> str | None:
    try:
        load("flash_attn_interface")
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
