"""Flash attention 4: the module `flash_attn.cute` of the flash-attn-4 package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import (
    COMPILER,
    Gradients,
    Problem,
    Result,
    Saved,
    gpu_limits,
    load,
    no_gpu,
    one_head_dim,
)
from dtensor_ring.compute.kernels.packages import missing_package
from dtensor_ring.compute.kernels.varlen import Band, VarlenKernel, lengths

# The smallest head dim whose gradients were found right.
SMALLEST = 32

# Head dims of query and value in multi-head latent attention, which has separate kernels.
LATENT = (192, 128)


class FlashAttn4(VarlenKernel):
    """Flash attention 4, written in Python for Hopper and Blackwell and compiled at first use.

    Tensors are `(B, L, N, H)`, the diagonal is aligned bottom-right, and `None` means an unbounded
    side. We accept the head dims that both kinds of GPU support in forward and backward, with
    softcap. On Hopper, gradients of grouped-query need one head dim for query, key and value.
    Gradients of head dims 8 and 16 are wrong there (4.0.0b36 on an H200), those of 32 and more are
    right.
    """

    name = "flash_attn4"
    fills_empty_rows = False  # see Note [Segments without keys or without rows]

    def missing(self) -> str | None:
        return no_gpu(9, 10) or _missing_package()

    def supports(self, problem: Problem) -> str | None:
        if (problem.head_dim, problem.value_head_dim) == LATENT:
            grouped = "it takes head dims of 192 and 128 without grouped-query only"
            return gpu_limits(problem) or (grouped if problem.grouped else None)
        small = f"its gradients are wrong below a head dim of {SMALLEST}, got {problem.head_dim}"
        is_small = problem.head_dim < SMALLEST
        return gpu_limits(problem) or one_head_dim(problem, 128) or (small if is_small else None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Result:
        from flash_attn.cute.interface import _flash_attn_fwd

        # Outside of autograd, lse is returned only on request.
        more = {**lengths(band.segments, q.device), **_options(band)}
        with COMPILER:
            out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **more)
        return out, lse

    def attend_backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, band: Band
    ) -> Gradients:
        from flash_attn.cute.interface import _flash_attn_bwd

        more = {**lengths(band.segments, q.device), **_options(band)}
        more["deterministic"] = torch.are_deterministic_algorithms_enabled()
        with COMPILER:
            dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, saved.out, saved.grad_out, saved.lse, **more)
        return dq, dk, dv


class Latents(NamedTuple):
    """Queries and latents in the parts that the package takes, by token.

    Attributes:
        q: the rotary part of queries `(B, L, N, 64)`.
        k: that of latents `(B, T, 1, 64)`.
        v: the other numbers of latents, which are the values, `(B, T, 1, 512)`.
        qv: those of queries `(B, L, N, 512)`.
        lists: int32 `(B, L, K)`, rows of the latents, -1 for none; K is a multiple of 128.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    qv: Tensor
    lists: Tensor

    def batch_rows(self) -> Iterator[Latents]:
        """Yield each row of the batch."""
        for row in range(len(self.q)):
            yield Latents._make(x[row : row + 1] for x in self)


# What attention to lists of latents takes, and its gradient; older betas have neither.
LISTS_NEEDED = "gather_kv_indices", "gather_bwd_recompute_p"
LISTS_BACKWARD = "_flash_attn_bwd_sparse_mla"


def missing_latents() -> str | None:
    """Return why attention to lists of latents cannot run here, or `None`."""
    if reason := no_gpu(10, 11) or _missing_package():
        return reason
    interface = load("flash_attn.cute.interface")
    parameters = signature(interface._flash_attn_fwd).parameters
    if all(name in parameters for name in LISTS_NEEDED) and hasattr(interface, LISTS_BACKWARD):
        return None
    return "its flash-attn-4 has no lists of keys; 4.0.0b36 has them"


def attend_to_latents(latents: Latents, scale: float, sinks: Tensor | None) -> Result:
    """Return out `(B, L, N, 512)` and lse `(B, L, N)`, which is float32 and has the sinks."""
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v, qv, lists = (x.detach() for x in latents)
    # It takes the exact maximum of a row only where a tensor asks for a gradient. With another one,
    # rounded weights put out off by one factor, which the gradients of a row would not cancel.
    qv = qv.requires_grad_()
    more = {"softmax_scale": scale, "learnable_sink": sinks, "return_lse": True}
    # Weights are computed again in backward, so none are kept, N x K for each query.
    more |= {"gather_kv_indices": lists, "gather_bwd_recompute_p": True}
    with COMPILER:
        out, lse, *_ = _flash_attn_fwd(q, k, v, qv, **more)
    return out, lse


# Gradients of scores that the backward pass of lists keeps at once, in 16 bits: 512 MiB.
LIST_SCORES = 1 << 28


def attend_to_latents_backward(
    saved: Saved, latents: Latents, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k`, `v` and `qv` of a batch of 1; those of latents in float32.

    Weights are `exp(score - lse)`, so an lse with sinks is all that it needs of them.
    """
    from flash_attn.cute.interface import _flash_attn_bwd_sparse_mla

    q, k, v, qv, lists = (x.detach() for x in latents)
    chunk = max(1, LIST_SCORES // (q.shape[2] * lists.shape[2]))
    more = {"softmax_scale": scale, "recompute_p": True, "token_chunk": chunk}
    with COMPILER:
        dq, dk, dv, dqv, _ = _flash_attn_bwd_sparse_mla(
            q, k, v, qv, saved.out, saved.grad_out, saved.lse, None, None, lists, **more
        )
    return dq, dk, dv, dqv


def _missing_package() -> str | None:
    return missing_package("flash-attn-4", _lacks)


# Arguments that the older function in flash-attn's own `flash_attn/cute` does not have.
NEEDED = "return_lse", "max_seqlen_q"

# The oldest beta of version 4.0.0 that has the gradient of a softcap.
OLDEST_BETA = 28


def _lacks(found: str) -> str | None:
    beta = re.match(r"4\.0\.0b(\d+)", found)
    is_old = beta is not None and int(beta[1]) < OLDEST_BETA
    if is_old or not found.startswith("4."):
        return f"it needs flash-attn-4 4.0.0b{OLDEST_BETA} or a later 4.x, found {found}"
    forward = load("flash_attn.cute.interface")._flash_attn_fwd
    missing = set(NEEDED) - set(signature(forward).parameters)
    if not missing:
        return None
    # flash-attn 2.8 contains an older flash_attn/cute, which overwrites flash-attn-4's.
    return (
        f"its function takes no {', '.join(sorted(missing))}: the flash-attn package has "
        "overwritten flash_attn/cute; install flash-attn-4 again, after flash-attn"
    )


def _options(band: Band) -> dict[str, object]:
    return {
        "softmax_scale": band.scale,
        "causal": band.is_causal,
        "window_size_left": band.window[0],
        "window_size_right": band.window[1],
        "softcap": band.softcap,
    }
