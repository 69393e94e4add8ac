"""cuDNN's attention to intervals of keys: `cudnn.flex_attention` of nvidia-cudnn-frontend."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.capture import RUN_ONCE, keep_captured, refuse_capture
from dtensor_ring.compute.kernels.cudnn import flash_or_reference
from dtensor_ring.compute.kernels.kernel import (
    COMPILER,
    Gradients,
    Intervals,
    Kernel,
    Launch,
    Problem,
    Result,
    Saved,
    Scores,
    gpu_limits,
    load,
    no_gpu,
    one_head_dim,
)
from dtensor_ring.compute.kernels.packages import missing_package, too_old
from dtensor_ring.planning.intervals import intervals_of
from dtensor_ring.planning.lru import ByteStore, cached_bytes
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.tile import Tile

EXECUTION, BUILDER = "cudnn.flex_attention.execution", "cudnn.flex_attention.plan.builder"

# Head dims of query and value in multi-head latent attention, and the largest ones.
LATENT, LARGEST = (192, 128), (256, 256)


# Note [cuDNN's intervals]. This is read from the sources of version 1.32.0; no GPU has run it here.
#
# - `create_mask_plan` turns intervals into lists of blocks, and bits for the blocks that are seen
#   in part. It waits for the GPU. A plan fits tensors of one dtype, shape and number of heads; one
#   with backward serves forward, too.
# - Tensors are `(B, L, N, H)`. Their memory and strides have to be multiples of 16 bytes, or of 128
#   in backward with a head dim of 256; it makes no copies itself.
# - lse is the natural logarithm, float32 and `(B, N, R)`. Rows without keys get an out of 0 and an
#   lse of -inf, which backward reads as 0. Backward takes the gradient of lse, but for head dims of
#   256 on Blackwell.
# - Grouped queries need no copies. On Hopper, gradients of them need one head dim, and some pairs
#   of different head dims have no gradients at all.
# - The functions that allocate results are private. They compile a kernel for each dtype, head
#   dims, group of heads and kind of plan, whatever the lengths are.
class CudnnFlex(Kernel):
    """All tiles of a step in one launch on Hopper and Blackwell, whatever they show."""

    name = "cudnn_flex"
    has_intervals = True

    def missing(self) -> str | None:
        return no_gpu(9, 10) or _missing_package()

    def supports(self, problem: Problem) -> str | None:
        # It has a gradient of lse, unlike the kernels that these limits are of.
        if reason := gpu_limits(replace(problem, differentiable_lse=False)):
            return reason
        if problem.softcap:
            return "it has no softcap"
        dims = problem.head_dim, problem.value_head_dim
        if dims == LATENT:
            grouped = "it takes head dims of 192 and 128 without grouped-query only"
            return grouped if problem.grouped else None
        if dims == LARGEST:
            has_no_slope = "it has no gradient of lse for a head dim of 256"
            return has_no_slope if problem.differentiable_lse else None
        return one_head_dim(problem, 128)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        from cudnn.flex_attention.execution import _flex_attention_forward

        if _is_thin(launch, q):
            return flash_or_reference(q, v).forward(q, k, v, launch, scores)
        q, k, v = (_token_major(x) for x in (q, k, v))
        plan = _plan_of(launch, q, k, v)
        options = {"mask_plan": plan, "softmax_scale": scores.scale, "return_lse": True}
        # Where gradients are recorded, it refuses a plan without backward.
        with COMPILER, torch.no_grad():
            out, lse, _ = _flex_attention_forward(q, k, v, **options)
        return out.transpose(1, 2), lse

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        from cudnn.flex_attention.execution import _flex_attention_backward

        if _is_thin(launch, q) and saved.grad_lse is None:
            return flash_or_reference(q, v).backward(saved, q, k, v, launch, scores)
        tensors = q, k, v, saved.out, saved.grad_out
        q, k, v, out, grad_out = (_token_major(x) for x in tensors)
        slopes = None if saved.grad_lse is None else saved.grad_lse.float().contiguous()
        options = {
            "mask_plan": _plan_of(launch, q, k, v, with_backward=True),
            "softmax_scale": scores.scale,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "dlse_tensor": slopes,
        }
        lse = saved.lse.contiguous()
        with COMPILER, torch.no_grad():
            grads = _flex_attention_backward(q, k, v, out, grad_out, lse, **options)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


# A tile of at most this many queries is not worth a plan: those of a cache differ by token.
THIN = 64


def _is_thin(launch: Launch, query: Tensor) -> bool:
    return launch.intervals is None and query.shape[2] <= THIN


def _token_major(x: Tensor) -> Tensor:
    """Return `(B, N, L, H)` as `(B, L, N, H)`; a copy if the package cannot load it as it is."""
    x = x.transpose(1, 2)
    num_bytes = 128 if x.shape[3] == LARGEST[0] else 16
    each = num_bytes // x.itemsize
    is_aligned = all(stride % each == 0 for stride in x.stride()[:3])
    if is_aligned and x.data_ptr() % num_bytes == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _Key(NamedTuple):
    """What a plan is made for; intervals are told apart by identity."""

    intervals: Intervals
    query: torch.Size
    key: torch.Size
    value_head_dim: int
    dtype: torch.dtype
    device: torch.device


class _Plan:
    """A plan of the package, and the streams that read it.

    Args:
        made: what `create_mask_plan` returned.
        with_backward: whether it serves backward.
    """

    def __init__(self, made: Any, with_backward: bool) -> None:
        from cudnn.flex_attention.execution import _plan_tensors

        self.made, self.with_backward = made, with_backward
        both = (*_plan_tensors(made), *_plan_tensors(made, deterministic=True))
        self._tensors = tuple({id(x): x for x in both}.values())
        self._streams = set[int]()

    @property
    def num_bytes(self) -> int:
        """Memory on the device, in bytes."""
        return 1000 + sum(x.nbytes for x in self._tensors)

    def read(self, device: torch.device) -> Any:
        """Return the plan for a launch on the current stream."""
        if device.type != "cuda":
            return self.made  # a stand-in
        keep_captured(device, [self])
        stream = torch.cuda.current_stream(device)
        # Memory knows its streams until it is freed, so once is enough.
        if stream.cuda_stream not in self._streams:
            for x in self._tensors:
                x.record_stream(stream)
            self._streams.add(stream.cuda_stream)
        return self.made


# Plans on devices: all layers and steps of training with one mask read the same ones.
_PLANS = ByteStore[_Plan](2**29, lambda plan: plan.num_bytes)


def _plan_of(launch: Launch, q: Tensor, k: Tensor, v: Tensor, with_backward: bool = False) -> Any:
    """Return the plan of a launch, which is kept; tensors are token-major."""
    seen = launch.intervals or _of_band(launch.mask, q.shape[1], k.shape[1])
    key = _Key(seen, q.shape, k.shape, v.shape[3], q.dtype, q.device)
    found = _PLANS.get(key)
    if found is None or (with_backward and not found.with_backward):
        found = _PLANS.put(key, _made(seen, q, k, v, with_backward))
    return found.read(q.device)


@cached_bytes(2**26, lambda intervals: intervals.num_bytes)
def _of_band(mask: Mask, num_rows: int, num_cols: int) -> Intervals:
    """Return the intervals of a tile."""
    return Intervals(intervals_of([Tile((0, num_rows), (0, num_cols), mask)], 1).ends)


def _made(seen: Intervals, q: Tensor, k: Tensor, v: Tensor, with_backward: bool) -> _Plan:
    from cudnn.flex_attention.plan.builder import create_mask_plan

    refuse_capture(q.device, "the plan of this mask is not made yet", RUN_ONCE)
    ends = seen.on(q.device).transpose(0, 1)  # `(F, B, R)`, where B is 1 if rows are alike
    ends = ends.expand(-1, q.shape[0], -1).flatten(1).unsqueeze(0).contiguous()
    with COMPILER, torch.no_grad():
        made = create_mask_plan(ends, q, k, v, build_backward=with_backward)
    plan = _Plan(made, with_backward)
    if q.device.type == "cuda":
        torch.cuda.current_stream(q.device).synchronize()  # other streams may read it
    return plan


# The package, and the oldest version whose sources were read.
PACKAGE, OLDEST = "nvidia-cudnn-frontend", (1, 32)


def _missing_package() -> str | None:
    return missing_package(PACKAGE, _lacks)


# What we call, and an argument that it needs.
NEEDED = (
    (BUILDER, "create_mask_plan", "build_backward"),
    (EXECUTION, "_flex_attention_forward", "return_lse"),
    (EXECUTION, "_flex_attention_backward", "dlse_tensor"),
    (EXECUTION, "_plan_tensors", "deterministic"),
)


def _lacks(found: str) -> str | None:
    if reason := too_old(PACKAGE, OLDEST, found):
        return reason
    for module, name, argument in NEEDED:
        function = getattr(load(module), name, None)
        if function is None or argument not in signature(function).parameters:
            return f"{PACKAGE} {found} has no {name} that takes {argument}"
    return None
