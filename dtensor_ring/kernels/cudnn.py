"""cuDNN's attention, through PyTorch's own operators.

Note [cuDNN's attention], as read in PyTorch's `cudnn/MHA.cpp`, `attention_backward.cu` and
`sdp_utils.cpp`, and in what PyTorch 2.11 to 2.15 say of shapes:

- lse is natural, float32 and `(B, N, R, 1)`, forward and backward. PyTorch merges it as it comes.
- Heads of keys are counted by themselves, so that grouped-query needs no copies, and gradients of
  keys have their heads.
- `is_causal` is aligned top-left, which is the same for squares. There are no windows.
- Head dims are multiples of 8 up to 128. Those above depend on the GPU and the version, gradients
  more so than the output: they are left to others. Dtypes are of 16 bits.
- Without segments, backward takes `None` for `attn_bias` and both `cum_seq`. Without dropout the
  random state is not read, but on Blackwell it is converted, so it has to be there.
- One query or one key is not for all versions: such tiles are written out instead.
- Backward, a graph is kept by the strides of query, key and value alone, and holds those of out and
  grad_out that it saw first, maybe in a call of PyTorch's own. So these get the query's order, as
  they have there.
- It is not deterministic, which PyTorch warns of or, told to be strict, refuses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.kernels.gpu import gpu_limits, no_gpu
from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.kernels.reference import Reference
from dtensor_ring.mask import Mask
from dtensor_ring.order import in_order, order_of

aten = torch.ops.aten


class Cudnn(Kernel):
    """`aten._scaled_dot_product_cudnn_attention`: full and causal tiles on Hopper and Blackwell.

    On older GPUs, where it runs as well, PyTorch prefers flash attention, and so do we.
    """

    name = "cudnn"

    def missing(self) -> str | None:
        reason = no_gpu(9, 10)
        if reason is None and not torch.backends.cudnn.is_available():
            return "this PyTorch was built without cuDNN"
        found = torch.backends.cudnn.version() if reason is None else None
        if found is not None and found < 90000:
            return f"it needs cuDNN 9, found version {found}"
        return reason

    def supports(self, problem: Problem) -> str | None:
        dims = problem.head_dim, problem.value_head_dim
        if reason := gpu_limits(problem):
            return reason
        if any(dim % 8 or dim > 128 for dim in dims):
            return f"it needs head dims that are multiples of 8 up to 128, got {dims[0]}, {dims[1]}"
        if problem.windowed:
            return "it has no windows"
        if problem.packed:
            return "it has no segments, and each document would be a launch of its own"
        if problem.softcap:
            return "it has no softcap"
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        strict = torch.are_deterministic_algorithms_enabled() and not warns
        return "its gradients are not deterministic" if strict else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        if _is_thin(query, key):
            return Reference().forward(query, key, value, mask, scale, softcap)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            *(query, key, value, None, True, 0.0, _is_causal(mask), False), scale=scale
        )
        return out, lse.squeeze(3)

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
        tensors = query, key, value
        if _is_thin(query, key):
            saved = out, lse, grad_lse
            return Reference().backward(grad_out, *tensors, *saved, mask, scale, softcap)
        grad_out, out = (in_order(x, order_of(query), x.dtype) for x in (grad_out, out))
        unused = torch.empty((), dtype=torch.int64, device=query.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            *(grad_out, *tensors, out, lse.contiguous().unsqueeze(3), unused, unused),
            *(None, None, None, query.shape[2], key.shape[2], 0.0, _is_causal(mask)),
            scale=scale,
        )


def _is_thin(query: Tensor, key: Tensor) -> bool:
    return query.shape[2] == 1 or key.shape[2] == 1


def _is_causal(mask: Mask) -> bool:
    assert mask in (Mask.full(), Mask.causal()), f"a tile of {mask}, though none is windowed"
    return mask == Mask.causal()
