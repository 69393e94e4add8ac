"""cuDNN's attention with windows and packed sequences: the ops of nvidia-cudnn-frontend."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.cudnn import flash_or_reference, is_thin, own_head_dims
from dtensor_ring.compute.kernels.kernel import (
    Gradients,
    Kernel,
    Launch,
    Problem,
    Result,
    Saved,
    Scores,
    Segments,
    gpu_limits,
    load,
    no_gpu,
)
from dtensor_ring.compute.kernels.packages import missing_package, too_old
from dtensor_ring.compute.kernels.varlen import clear_empty_rows, sizes, without_partners

cudnn = torch.ops.cudnn


# Note [cuDNN's windows]. This is read from the sources of version 1.32.0; no GPU has run it here.
#
# - `cudnn.sdpa.fwd.torch_op` registers `torch.ops.cudnn.sdpa_fwd` and `sdpa_bwd`. A tile is `(B, N,
#   L, H)` with an lse of `(B, N, R, 1)`. Packed sequences are `(T, N, H)`, with an lse of `(T, N,
#   1)` forward, and one that is padded to `(B, N, max_seqlen_q, 1)` backward.
# - The diagonal is aligned top-left. `window_left` counts the query's own key, so it is one more
#   than ours; -1 is unbounded.
# - Without lengths, a window needs as many keys as queries, or more. Flash attention computes other
#   tiles, and those of a single query or key.
# - cuDNN builds a graph for each shape, strides and mask, and keeps 128 of them. A shape of packed
#   sequences is their number and the longest lengths. So these are rounded up, and sequences
#   without tokens come at the end: most documents of other lengths need no other graph.
# - Nothing says what it writes for queries without keys, and for keys without queries. So the
#   adapter writes there.
# - lse has no gradient. Head dims are multiples of 8 up to 128. Whether gradients are deterministic
#   depends on GPU and version.
class CudnnSdpa(Kernel):
    """Windows and packed documents on Hopper and Blackwell."""

    name = "cudnn_sdpa"
    has_segments = True

    def missing(self) -> str | None:
        return no_gpu(9, 10) or _missing_package()

    def supports(self, problem: Problem) -> str | None:
        if reason := gpu_limits(problem) or own_head_dims(problem):
            return reason
        if problem.softcap:
            return "it has no softcap"
        # Refuse it under a mere warning, too: the package refuses what it cannot do.
        is_free = problem.determinism == "off"
        return None if is_free else "some GPUs and versions have no deterministic gradients of it"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        if _is_for_others(q, k, launch):
            return flash_or_reference(q, v).forward(q, k, v, launch, scores)
        more = _options(launch, q.device)
        out, lse = cudnn.sdpa_fwd(q, k, v, scores.scale, **more)
        lse = lse.squeeze(-1)
        if launch.segments is None:
            return out, lse
        return clear_empty_rows(out, lse.T.contiguous(), launch.segments, fill=True)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        if _is_for_others(q, k, launch):
            return flash_or_reference(q, v).backward(saved, q, k, v, launch, scores)
        more, segments, lse = _options(launch, q.device), launch.segments, saved.lse
        if segments is not None:
            lse = _padded(lse.T, more["cu_seqlens_q"], more["max_seqlen_q"])
        dq, dk, dv = cudnn.sdpa_bwd(saved.grad_out, q, k, v, saved.out, lse, scores.scale, **more)
        # The op leaves what it does not visit unwritten.
        if segments is not None:
            rows, cols = segments.boundaries(q.device)
            if segments.has_empty_rows:
                _clear(dq, rows, cols)
            if segments.has_empty_cols:
                _clear(dk, cols, rows)
                _clear(dv, cols, rows)
        return dq, dk, dv


def _is_for_others(query: Tensor, key: Tensor, launch: Launch) -> bool:
    """Return whether a tile is one that cuDNN does not take."""
    if launch.segments is not None:
        return False
    is_tall = launch.mask.left is not None and query.shape[2] > key.shape[2]
    return is_tall or is_thin(query, key)


def _options(launch: Launch, device: torch.device) -> dict[str, Any]:
    """Return the band of a launch, and the lengths of its segments, as arguments of the ops."""
    mask = launch.mask
    options: dict[str, Any] = {
        "window_left": -1 if mask.left is None else mask.left + 1,  # with the query's own key
        "window_right": -1 if mask.right is None else mask.right,
    }
    if launch.segments is None:
        return options
    cu_q, cu_kv, max_q, max_kv = sizes(_rounded(launch.segments), device)
    options |= {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
    return options | {"max_seqlen_q": _rounded_up(max_q), "max_seqlen_kv": _rounded_up(max_kv)}


def _rounded(segments: Segments) -> Segments:
    """Return segments whose number is a power of two, made once: the last ones are empty."""
    rounded = _ROUNDED.get(segments)
    if rounded is None:
        # A graph is made for each number of segments, and powers of two are few.
        number = len(segments.rows) - 1
        rest = _power(number) - number
        rows, cols = ((*x, *[x[-1]] * rest) for x in (segments.rows, segments.cols))
        rounded = _ROUNDED[segments] = Segments(rows, cols)
    return rounded


# The keys are weak, so they live as long as the plan of their launch.
_ROUNDED: WeakKeyDictionary[Segments, Segments] = WeakKeyDictionary()


def _power(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def _rounded_up(length: int) -> int:
    """Return a length that is at most a quarter more: one of four between powers of two.

    >>> [_rounded_up(x) for x in (0, 5, 1024, 1025)]
    [1, 5, 1024, 1280]
    """
    step = max(1, _power(length) // 8)
    return max(1, -(-length // step) * step)


def _padded(lse: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Return the lse `(T, N)` of packed sequences as backward takes it."""
    from cudnn.sdpa.fwd.torch_op import thd_lse_to_padded

    return thd_lse_to_padded(lse, cu_seqlens, longest)


def _clear(x: Tensor, own: Tensor, other: Tensor) -> None:
    """Set `x` `(T, N, H)` to 0 in segments that have nothing on the other side."""
    x.masked_fill_(without_partners(own, other, len(x)).view(-1, 1, 1), 0)


# The oldest version of the package whose sources were read. Earlier versions of cuDNN have windows
# that the package works around, or refuses.
PACKAGE, OLDEST, OLDEST_CUDNN = "nvidia-cudnn-frontend", (1, 32), 91500


def _missing_package() -> str | None:
    return missing_package(PACKAGE, _lacks)


# The module that registers the ops, and what it must have.
OPS, PADDED = "cudnn.sdpa.fwd.torch_op", "thd_lse_to_padded"
NEEDED = (("sdpa_fwd", "window_right"), ("sdpa_bwd", "cu_seqlens_kv"))


def _lacks(found: str) -> str | None:
    if reason := too_old(PACKAGE, OLDEST, found):
        return reason
    module = load(OPS)
    for name, argument in NEEDED:
        op = getattr(cudnn, name, None)
        if op is None or argument not in {x.name for x in op.default._schema.arguments}:
            return f"{PACKAGE} {found} has no op {name} that takes {argument}"
    if not hasattr(module, PADDED):
        return f"{PACKAGE} {found} has no {PADDED}"
    if (of_cudnn := load("cudnn").backend_version()) < OLDEST_CUDNN:
        return f"it needs cuDNN 9.15 or later, found version {of_cudnn}"
    return None
