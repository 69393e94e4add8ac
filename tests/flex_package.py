"""Stand-ins for `cudnn.flex_attention` of nvidia-cudnn-frontend 1.32: attention to intervals.

They refuse what the package refuses, and compute in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

PACKAGES = "cudnn", "cudnn.flex_attention", "cudnn.flex_attention.plan"
BUILDER, EXECUTION = "cudnn.flex_attention.plan.builder", "cudnn.flex_attention.execution"

CREATE = (
    "mask_func, q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, pack_gqa=None, build_backward=None, _fwd_variant=None"
)
FORWARD = (
    "q_tensor, k_tensor, v_tensor, *, mask_plan, softmax_scale=None, return_lse=False, "
    "stream=None, return_max_logit=False"
)
BACKWARD = (
    "q_tensor, k_tensor, v_tensor, o_tensor, do_tensor, lse_tensor, *, mask_plan, "
    "softmax_scale=None, deterministic=False, dlse_tensor=None, stream=None"
)
TENSORS = "mask_plan, *, deterministic=False"

EQUAL = [(x, x) for x in range(8, 129, 8)]
HEAD_DIMS = [*EQUAL, *((x, y) for x, _ in EQUAL for y, _ in EQUAL), (192, 128), (256, 256)]
"""Of queries and keys, and of values."""
NO_GRADIENTS = [(x, y) for x in (56, 64) for y in range(104, 129, 8)]
"""Those that `sm90_native_bwd_can_implement` says no to, of as many key heads as query heads."""

Given = dict[str, Any]


class Values(dict[str, Any]):
    """As its `TupleDict`, it unpacks to values."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


class Plan:
    """What `create_mask_plan` returns.

    Attributes:
        made: how many were made, with backward and without.
    """

    made: ClassVar[list[bool]] = []

    def __init__(self, given: Given) -> None:
        q, k, v, ends = (given[name] for name in ("q", "k", "v", "mask_func"))
        assert given["cu_seqlens_q"] is None, "fixed lengths"
        (batch, rows, heads, head_dim), cols = q.shape, k.shape[1]
        self.shapes, self.dtype = (q.shape, k.shape, v.shape), q.dtype
        self.has_backward = given["build_backward"]
        assert k.shape[:3] == v.shape[:3]
        assert (k.shape[0], k.shape[3], heads % k.shape[2]) == (batch, head_dim, 0)
        dims = head_dim, v.shape[3]
        assert dims in HEAD_DIMS
        if self.has_backward:
            assert dims not in NO_GRADIENTS
            assert heads == k.shape[2] or dims[0] == dims[1], "grouped, with one head dim"
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert ends.shape[::2] == (1, batch * rows)
        assert ends.shape[1] % 2 == 1
        assert (ends.diff(dim=1) >= 0).all()
        assert 0 <= ends.min() <= ends.max() <= cols
        ends = ends[0].unflatten(1, (batch, rows)).unsqueeze(-1)
        keys = torch.arange(cols)
        self.seen = keys < ends[0]
        for begin, end in zip(ends[1::2], ends[2::2], strict=True):
            self.seen |= (keys >= begin) & (keys < end)
        self.made.append(self.has_backward)

    def check(self, tensors: list[Tensor], num_bytes: int = 16) -> None:
        """What is refused of tensors of a call, query, key and value first."""
        assert tuple(x.shape for x in tensors[:3]) == self.shapes
        records = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        assert self.has_backward or not records, "was built without backward payloads"
        for x in tensors:
            assert x.dtype == self.dtype
            assert x.stride(-1) == 1
            # Memory of a CPU begins at multiples of 64 bytes.
            assert x.data_ptr() % min(num_bytes, 64) == 0, "implicit copies are not supported"
            assert all(stride * x.itemsize % num_bytes == 0 for stride in x.stride()[:-1])

    def scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """`(B, N, R, C)`, -inf where hidden."""
        found = torch.einsum("brnh,bcnh->bnrc", query, key) * scale
        return found.masked_fill(~self.seen.unsqueeze(1), -torch.inf)


def wide(x: Tensor, heads: int) -> Tensor:
    return x.double().repeat_interleave(heads // x.shape[2], 2)


def forward(given: Given) -> Values:
    plan, names = given["mask_plan"], ("q_tensor", "k_tensor", "v_tensor")
    tensors = [given[name] for name in names]
    plan.check(tensors)
    assert given["return_lse"]
    query, key, value = (wide(x, tensors[0].shape[2]) for x in tensors)
    scores = plan.scores(query, key, given["softmax_scale"])
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    out = torch.einsum("bnrc,bcnh->brnh", weights, value).to(plan.dtype)
    return Values(o_tensor=out, lse_tensor=lse.float(), max_logit_tensor=None)


def backward(given: Given) -> Values:
    plan, (lse, slope) = given["mask_plan"], (given[x] for x in ("lse_tensor", "dlse_tensor"))
    tensors = [given[f"{name}_tensor"] for name in ("q", "k", "v", "o", "do")]
    assert plan.has_backward, "was built without backward metadata"
    plan.check(tensors, 128 if tensors[0].shape[3] == 256 else 16)
    strict = torch.are_deterministic_algorithms_enabled()
    assert given["deterministic"] is strict
    heads, kv_heads = (x.shape[2] for x in tensors[:2])
    for x in (lse, *([] if slope is None else [slope])):
        assert (x.dtype, x.is_contiguous()) == (torch.float32, True)
        assert x.shape == tensors[0].shape[:3:2] + tensors[0].shape[1:2]
    query, key, value, out, grad_out = (wide(x, heads) for x in tensors)
    scores = plan.scores(query, key, given["softmax_scale"])
    weights = (scores - lse.double().masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    delta = (grad_out * out).sum(-1).transpose(1, 2)
    delta = delta if slope is None else delta - slope
    grads = torch.einsum("brnh,bcnh->bnrc", grad_out, value) - delta.unsqueeze(-1)
    grads = weights * grads * given["softmax_scale"]
    dq = torch.einsum("bnrc,bcnh->brnh", grads, key)
    dk, dv = (
        torch.einsum("bnrc,brnh->bcnh", x, y).unflatten(2, (kv_heads, -1)).sum(3)
        for x, y in ((grads, query), (weights, grad_out))
    )
    dq, dk, dv = (x.to(plan.dtype) for x in (dq, dk, dv))
    return Values(dq_tensor=dq, dk_tensor=dk, dv_tensor=dv)


FUNCTIONS = {
    BUILDER: {"create_mask_plan": (CREATE, Plan)},
    EXECUTION: {
        "_flex_attention_forward": (FORWARD, forward),
        "_flex_attention_backward": (BACKWARD, backward),
        "_plan_tensors": (TENSORS, lambda given: (given["mask_plan"].seen,)),
    },
}
"""Signatures, and what they compute, by module and name."""
