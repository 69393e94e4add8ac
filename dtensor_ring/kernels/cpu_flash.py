"""PyTorch's flash attention for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.kernels.band import Bias, col_blocks, row_blocks
from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.mask import Mask
from dtensor_ring.order import TOKEN_MAJOR, empty, order_of, zeros

aten = torch.ops.aten

BLOCK = 192
"""Queries or keys of a launch: fewer are slow, of more there is less visible."""

WHOLE = 256
"""Rows of a causal square that is one launch, and of any tile for which keys stay as they are."""

LARGE = 768
"""Rows from which a causal square is one launch again: there the kernel's own blocks are good."""


class CpuFlash(Kernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu`, which needs equal head dims.

    It has no window, and scores up to twice what is visible of a small causal square: both are
    computed by blocks. Forward these are of rows, so that nothing is merged; backward of columns,
    so that only gradients of queries are summed up.
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
        key, value = _by_head(query, key), _by_head(query, value)
        if _in_one(mask, query):
            return kernel(query, key, value, is_causal=mask == Mask.causal(), scale=scale)
        out = empty(query, query.shape, order_of(query))
        wide = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_empty(query.shape[:3], dtype=wide)
        blocks = row_blocks(query.shape[2], key.shape[2], mask, BLOCK)
        bias = Bias(blocks, mask, query)
        for rows, cols in blocks:
            tensors = query[:, :, rows], key[:, :, cols], value[:, :, cols]
            result = kernel(*tensors, attn_mask=bias.of((rows, cols)), scale=scale)
            out[:, :, rows], lse[:, :, rows] = result
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
        key, value = _by_head(query, key), _by_head(query, value)
        if _in_one(mask, query):
            causal = mask == Mask.causal()
            return kernel(grad_out, query, key, value, out, lse, 0.0, causal, scale=scale)
        grad_query = zeros(query, query.shape, TOKEN_MAJOR, lse.dtype)
        grad_key, grad_value = (empty(x, x.shape, TOKEN_MAJOR) for x in (key, value))
        blocks = col_blocks(query.shape[2], key.shape[2], mask, BLOCK)
        bias = Bias(blocks, mask, query)
        for rows, cols in blocks:
            tensors = grad_out[:, :, rows], query[:, :, rows], key[:, :, cols], value[:, :, cols]
            saved = out[:, :, rows], lse[:, :, rows]
            part = bias.of((rows, cols))
            grads = kernel(*tensors, *saved, 0.0, False, attn_mask=part, scale=scale)
            grad_query[:, :, rows] += grads[0]
            grad_key[:, :, cols] = grads[1]
            grad_value[:, :, cols] = grads[2]
        return grad_query.to(query.dtype), grad_key, grad_value


def _in_one(mask: Mask, query: Tensor) -> bool:
    """Whether one launch serves the tile best; matrix products of 16 bits gain by large blocks."""
    if mask != Mask.causal():
        return mask == Mask.full()
    return query.dtype.itemsize == 2 or not WHOLE < query.shape[2] < LARGE


def _by_head(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values, the tokens of a head next to each other if they are read often enough."""
    by_head = x.stride(2) == x.shape[3]
    return x if by_head or query.shape[2] < WHOLE else x.contiguous()
