"""PyTorch's own flash attention 2 for CUDA GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.mask import Mask

aten = torch.ops.aten


class CudaFlash(Kernel):
    """`aten._flash_attention_forward`: grouped-query, differing lengths and windows.

    Its tensors are `(B, L, N, H)` and its diagonal is aligned bottom-right.
    """

    name = "cuda_flash"

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch was built without flash attention"
        return too_old_for_flash2()

    def supports(self, problem: Problem) -> str | None:
        return flash2_limits(problem) or ("it has no softcap" if problem.softcap else None)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        rows, cols = q.shape[1], k.shape[1]
        left, right = bottom_right(mask, rows, cols)
        out, lse, *_ = aten._flash_attention_forward(
            *(q, k, v, None, None, rows, cols, 0.0, mask == Mask.causal(), False),
            scale=scale,
            window_size_left=left,
            window_size_right=right,
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
        tensors = [x.transpose(1, 2) for x in (grad_out, query, key, value, out)]
        rows, cols = query.shape[2], key.shape[2]
        left, right = bottom_right(mask, rows, cols)
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # dropout's random state
        grads = aten._flash_attention_backward(
            *(*tensors, lse.contiguous(), None, None, rows, cols, 0.0, mask == Mask.causal()),
            *(unused, unused),
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        query_grad, key_grad, value_grad = (grad.transpose(1, 2) for grad in grads)
        return query_grad, key_grad, value_grad


def too_old_for_flash2() -> str | None:
    """Why flash attention 2 does not run on the current GPU."""
    major, minor = torch.cuda.get_device_capability()
    return f"it needs compute capability 8.0, this GPU has {major}.{minor}" if major < 8 else None


def flash2_limits(problem: Problem) -> str | None:
    """What no build of flash attention 2 can do."""
    if problem.device_type != "cuda":
        return f"it runs on CUDA, the tensors are on {problem.device_type}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {problem.dtype}"
    if problem.head_dim != problem.value_head_dim:
        return (
            "it needs one head dim for query, key and value, "
            f"got {problem.head_dim} and {problem.value_head_dim}"
        )
    if problem.head_dim % 8 or problem.head_dim > 256:
        return f"it needs a head dim that is a multiple of 8 up to 256, got {problem.head_dim}"
    if problem.scale <= 0:
        return f"it needs a positive scale, got {problem.scale}"
    return "it has no gradient of lse" if problem.differentiable_lse else None


def bottom_right(mask: Mask, rows: int, cols: int) -> tuple[int | None, int | None]:
    """The band as `window_size` of a kernel that aligns the last row with the last column.

    Note [Windows aligned bottom-right]: a trimmed tile has `rows <= cols + left` and
    `cols <= rows + right`, so neither bound can become negative, which such kernels take for
    unbounded. But they also take a bound from `cols` on for unbounded, and then an unbounded right
    side for `cols` columns past the diagonal. With more rows than columns that hides keys from the
    first rows, so the planner cuts such tiles in two.
    """
    if mask == Mask.causal():
        return None, None  # the causal flag says it
    left = None if mask.left is None else mask.left + cols - rows
    right = None if mask.right is None else mask.right - cols + rows
    assert left is None or right is not None or rows <= cols, f"{rows} x {cols} with {mask}"
    assert right is None or right < cols, f"{rows} x {cols} with {mask}"
    return left, right
