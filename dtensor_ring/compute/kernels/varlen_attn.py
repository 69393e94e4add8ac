"""PyTorch's `varlen_attn` over block tables, for CUDA GPUs."""

from __future__ import annotations

from inspect import signature

import torch
from torch import Tensor
from torch.nn import attention

from dtensor_ring.compute.kernels.gpu import gpu_limits, no_gpu, one_head_dim
from dtensor_ring.compute.kernels.kernel import Result
from dtensor_ring.compute.kernels.paged import PagedKernel, Pages, whole_pages
from dtensor_ring.compute.kernels.problem import Problem
from dtensor_ring.compute.kernels.scores import Scores


class VarlenAttn(PagedKernel):
    """`torch.nn.attention.varlen.varlen_attn(..., seqused_k=, block_table=)`, from PyTorch 2.13."""

    name = "varlen_attn"

    def missing(self) -> str | None:
        return no_gpu() or _missing_argument()

    def supports(self, problem: Problem, block: int) -> str | None:
        # The check of flash attention 2, which PyTorch runs unless another one was activated.
        if reason := gpu_limits(problem) or one_head_dim(problem, 256) or whole_pages(block, 256):
            return reason
        return "it has no softcap" if problem.softcap else None

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        entries, num_rows, heads, _ = query.shape
        tables, lengths = pages.on(query.device)
        rows = torch.arange(entries + 1, dtype=torch.int32, device=query.device) * num_rows
        out, lse = varlen_attn(
            *(query.flatten(0, 1), key_blocks, value_blocks, rows, _boundaries(lengths)),
            *(num_rows, pages.longest),
            return_aux=AuxRequest(lse=True),
            scale=scores.scale,
            enable_gqa=heads != key_blocks.shape[2],
            seqused_k=lengths,
            block_table=tables,
            # Keys in one split: flash attention 2 mixes up the parts of several in packed rows,
            # Dao-AILab/flash-attention#2812.
            num_splits=1,
        )
        lse = lse.unflatten(1, (entries, num_rows)).transpose(0, 1)
        return out.unflatten(0, (entries, num_rows)), lse


def _boundaries(lengths: Tensor) -> Tensor | None:
    """The boundaries of the keys, as if they were packed."""
    # Flash attention 2 wants both sides or none, and reads the lengths; 3 and 4 refuse them.
    if attention.current_flash_attention_impl() not in (None, "FA2"):
        return None
    zero = lengths.new_zeros(1)
    return torch.cat([zero, lengths.cumsum(0, dtype=torch.int32)])


def _missing_argument() -> str | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return f"this PyTorch has no varlen_attn: {error}"
    if {"seqused_k", "block_table", "num_splits"} <= set(signature(varlen_attn).parameters):
        return None
    return "varlen_attn of this PyTorch reads no block tables, 2.13 and later do"
