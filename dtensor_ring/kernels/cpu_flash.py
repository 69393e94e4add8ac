"""PyTorch's flash attention for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.mask import Mask

aten = torch.ops.aten


class CpuFlash(Kernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu`, which needs equal head dims."""

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
        if problem.mask.left is not None:
            return f"it has no window, the mask looks back at most {problem.mask.left} tokens"
        if problem.differentiable_lse:
            return "it has no gradient of lse"
        return "it has no softcap" if problem.softcap else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=mask == Mask.causal(), scale=scale
        )

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
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, mask == Mask.causal(), scale=scale
        )
