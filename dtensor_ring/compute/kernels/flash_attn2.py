"""The flash-attn package, version 2.7 or later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import (
    Gradients,
    PagedKernel,
    Pages,
    Problem,
    Result,
    Saved,
    Scores,
    gpu_limits,
    load,
    no_gpu,
    one_head_dim,
    whole_pages,
)
from dtensor_ring.compute.kernels.packages import missing_package
from dtensor_ring.compute.kernels.varlen import Band, VarlenKernel, sizes


class PagedFlashAttn2(PagedKernel):
    """`flash_attn_with_kvcache`, which reads keys through block tables."""

    name = "flash_attn2"

    def missing(self) -> str | None:
        return no_gpu() or _missing_package()

    def supports(self, problem: Problem, block: int) -> str | None:
        return gpu_limits(problem) or one_head_dim(problem, 256) or whole_pages(block, 256)

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        from flash_attn.flash_attn_interface import flash_attn_with_kvcache

        tables, lengths = pages.on(query.device)
        return flash_attn_with_kvcache(
            query,
            key_blocks,
            value_blocks,
            cache_seqlens=lengths,
            block_table=tables,
            softmax_scale=scores.scale,
            softcap=scores.softcap,
            return_softmax_lse=True,
        )


class FlashAttn2(VarlenKernel):
    """Flash attention 2 (Dao, 2023, arXiv 2307.08691) from the flash-attn package, with softcap."""

    name = "flash_attn2"
    paged = PagedFlashAttn2()

    def functions(self) -> Any:
        """Return the module with the private functions; the public ones return no lse."""
        from flash_attn import flash_attn_interface

        return flash_attn_interface

    def missing_package(self) -> str | None:
        """Return why the functions are missing, or `None`."""
        return _missing_package()

    def missing(self) -> str | None:
        return no_gpu() or self.missing_package()

    def supports(self, problem: Problem) -> str | None:
        return gpu_limits(problem) or one_head_dim(problem, 256)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Result:
        flash, more = self.functions(), {**_options(band), "return_softmax": False}
        if band.segments is None:
            out, lse, *_ = flash._flash_attn_forward(q, k, v, **more)
        else:
            rows, cols, max_rows, max_cols = sizes(band.segments, q.device)
            out, lse, *_ = flash._flash_attn_varlen_forward(
                q, k, v, rows, cols, max_rows, max_cols, **more
            )
        return out, lse

    def attend_backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, band: Band
    ) -> Gradients:
        flash = self.functions()
        # The call writes gradients to tensors of the caller.
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = saved.grad_out, q, k, v, saved.out, saved.lse, *grads
        more = {
            **_options(band),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if band.segments is None:
            flash._flash_attn_backward(*tensors, **more)
        else:
            flash._flash_attn_varlen_backward(*tensors, *sizes(band.segments, q.device), **more)
        return grads


def _missing_package() -> str | None:
    return missing_package("flash-attn", _lacks)


def _lacks(found: str) -> str | None:
    major, minor = map(int, found.split(".")[:2])
    if (major, minor) < (2, 7) or major > 2:
        return f"it needs flash-attn 2.7 or a later 2.x, found {found}"
    load("flash_attn.flash_attn_interface")
    return None


def _options(band: Band) -> dict[str, object]:
    left, right = band.window
    return {
        "dropout_p": 0.0,
        "softmax_scale": band.scale,
        "causal": band.is_causal,
        # Here -1 means unbounded; None is not accepted.
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
        "softcap": band.softcap,
        "alibi_slopes": None,
    }
