"""cuDNN's attention, through PyTorch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.cuda_flash import CudaFlash
from dtensor_ring.compute.kernels.kernel import (
    Gradients,
    Kernel,
    Launch,
    Problem,
    Result,
    Saved,
    Scores,
    gpu_limits,
    no_gpu,
)
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.memory import in_order, order_of
from dtensor_ring.planning.mask import Mask

aten = torch.ops.aten


# Note [cuDNN's attention]. The sources are PyTorch's `cudnn/MHA.cpp`, `attention_backward.cu` and
# `sdp_utils.cpp`, and the shape checks of PyTorch 2.11 to 2.15:
#
# - lse is the natural logarithm, float32 and `(B, N, R, 1)`, in forward and backward.
# - Keys may have fewer heads than queries, so grouped-query needs no copies.
# - `is_causal` is aligned top-left, which makes no difference for squares. There are no windows.
# - Head dims are multiples of 8 up to 128. Whether larger ones work depends on the GPU and the
#   version, so other kernels serve them. Dtypes have 16 bits.
# - Without segments, backward takes `None` for `attn_bias` and both `cum_seq`. Without dropout the
#   random state is not read, but Blackwell converts it, so it must be passed.
# - Not all versions accept a single query or a single key, so flash attention computes such tiles,
#   or the reference where head dims differ.
# - PyTorch caches the backward graph by the strides of query, key and value only. So `out` and
#   `grad_out` must always have the query's memory order, as they do in PyTorch's own calls.
# - The gradients are not deterministic. PyTorch warns of this or, in strict mode, refuses.
class Cudnn(Kernel):
    """`aten._scaled_dot_product_cudnn_attention`: full and causal tiles on Hopper and Blackwell.

    It also runs on older GPUs, but there PyTorch prefers flash attention, and so do we.
    """

    name = "cudnn"

    def missing(self) -> str | None:
        reason = no_gpu(9, 10)
        if reason is None and not torch.backends.cudnn.is_available():
            return "this PyTorch was built without cuDNN"
        # Ask for the version only if there is a GPU, because the call loads cuDNN.
        found = torch.backends.cudnn.version() if reason is None else None
        if found is not None and found < 90000:
            return f"it needs cuDNN 9, found version {found}"
        return reason

    def supports(self, problem: Problem) -> str | None:
        if reason := gpu_limits(problem) or own_head_dims(problem):
            return reason
        if problem.windowed:
            return "it has no windows"
        if problem.packed:
            return "it has no segments, and each document would be a launch of its own"
        if problem.softcap:
            return "it has no softcap"
        # Last of all: only a strict setting refuses what the kernel can compute.
        is_strict = problem.determinism == "strict"
        return "its gradients are not deterministic" if is_strict else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        if is_thin(q, k):
            return flash_or_reference(q, v).forward(q, k, v, launch, scores)
        is_causal = _is_causal(launch.mask)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, is_causal, False, scale=scores.scale
        )
        return out, lse.squeeze(3)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        if is_thin(q, k):
            return flash_or_reference(q, v).backward(saved, q, k, v, launch, scores)
        # Use the query's memory order: see Note [cuDNN's attention] on PyTorch's cache.
        grad_out, out = (in_order(x, order_of(q), x.dtype) for x in (saved.grad_out, saved.out))
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        return aten._scaled_dot_product_cudnn_attention_backward.default(
            grad_out,
            q,
            k,
            v,
            out,
            saved.lse.contiguous().unsqueeze(3),
            unused,
            unused,
            None,  # no bias, and no packed sequences
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,  # no dropout
            _is_causal(launch.mask),
            scale=scores.scale,
        )


def own_head_dims(problem: Problem) -> str | None:
    """Return why cuDNN does not take the head dims, which may differ, or `None`."""
    dims = problem.head_dim, problem.value_head_dim
    if any(dim % 8 or dim > 128 for dim in dims):
        return f"it needs head dims that are multiples of 8 up to 128, got {dims[0]}, {dims[1]}"
    return None


def is_thin(query: Tensor, key: Tensor) -> bool:
    """Return whether there is a single query or a single key."""
    return query.shape[2] == 1 or key.shape[2] == 1


def flash_or_reference(query: Tensor, value: Tensor) -> Kernel:
    """Return the kernel for tiles that cuDNN does not take: flash attention has one head dim."""
    flash, has_one_dim = CudaFlash(), query.shape[3] == value.shape[3]
    return flash if has_one_dim and flash.missing() is None else Reference()


def _is_causal(mask: Mask) -> bool:
    assert mask in (Mask.full(), Mask.causal()), f"a tile of {mask}, though none is windowed"
    return mask == Mask.causal()
