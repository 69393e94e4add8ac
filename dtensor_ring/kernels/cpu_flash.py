"""PyTorch's flash attention for CPUs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dtensor_ring.kernels.band import hidden, row_blocks
from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.mask import Mask
from dtensor_ring.order import empty, order_of

aten = torch.ops.aten

BAND_ROWS = 128
"""Queries per launch of a band: few, so that little is scored outside of it."""


class CpuFlash(Kernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu`, which needs equal head dims.

    It has no window: a band is cut into blocks of rows, each with the columns that it sees and a
    mask that all blocks but those at the ends share.
    """

    name = "cpu_flash"

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        if problem.device_type != "cpu":
            return f"it runs on a CPU, the tensors are on {problem.device_type}"
        if problem.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it takes float64, float32, bfloat16 and float16, not {problem.dtype}"
        if problem.head_dim != problem.value_head_dim:
            return (
                "it needs one head dim for query, key and value, "
                f"got {problem.head_dim} and {problem.value_head_dim}"
            )
        if problem.scale <= 0:
            return f"it needs a positive scale, got {problem.scale}"
        if problem.differentiable_lse:
            return "it has no gradient of lse"
        return "it has no softcap" if problem.softcap else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        if mask in (Mask.full(), Mask.causal()):
            return kernel(query, key, value, is_causal=mask == Mask.causal(), scale=scale)
        out = empty(query, query.shape, order_of(query))
        wide = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_empty(query.shape[:3], dtype=wide)
        for rows, cols, bias in _blocks(query, key, mask):
            tensors = query[:, :, rows], key[:, :, cols], value[:, :, cols]
            out[:, :, rows], lse[:, :, rows] = kernel(*tensors, attn_mask=bias, scale=scale)
        return out, lse

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
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        if mask in (Mask.full(), Mask.causal()):
            causal = mask == Mask.causal()
            return kernel(grad_out, query, key, value, out, lse, 0.0, causal, scale=scale)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))
        for rows, cols, bias in _blocks(query, key, mask):
            tensors = grad_out[:, :, rows], query[:, :, rows], key[:, :, cols], value[:, :, cols]
            saved = out[:, :, rows], lse[:, :, rows]
            grads = kernel(*tensors, *saved, 0.0, False, attn_mask=bias, scale=scale)
            grad_query[:, :, rows] = grads[0]
            grad_key[:, :, cols] += grads[1]
            grad_value[:, :, cols] += grads[2]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _blocks(query: Tensor, key: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Blocks of rows, the columns that they see, and what to add to their scores."""
    biases: dict[tuple[int, int, int], Tensor | None] = {}
    for rows, cols in row_blocks(query.shape[2], key.shape[2], mask, BAND_ROWS):
        shape = rows.stop - rows.start, cols.stop - cols.start, rows.start - cols.start
        if shape not in biases:
            outside = hidden(rows, cols, mask, query.device)
            zeros = query.new_zeros(shape[:2])
            biases[shape] = None if outside is None else zeros.masked_fill_(outside, -torch.inf)
        yield rows, cols, biases[shape]
