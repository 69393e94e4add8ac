"""Flash attention 3, the `flash_attn_interface` module that flash-attn's `hopper` folder builds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.gpu import gpu_limits, load, no_gpu, one_head_dim
from dtensor_ring.compute.kernels.kernel import Gradients, Problem, Result, Saved, Scores
from dtensor_ring.compute.kernels.paged_kernel import PagedKernel, Pages
from dtensor_ring.compute.kernels.varlen import Band, VarlenKernel, lengths

flash = torch.ops.flash_attn_3

SM_MARGIN = 8
"""Multiprocessors that a forward leaves to messages in flight.

It runs one block on each of the others until all is done, and NCCL's kernels share none with it.
So without a margin a message that loses the race waits until the tile is done. The backward's
blocks end one by one, and need none. Eight of an H100's 132 is a guess: no GPU measured it.
"""


HEAD_DIMS = (64, 96, 128, 192, 256)
"""Those that kernels are built for."""


class FlashAttn3(VarlenKernel):
    """Flash attention 3 (Shah et al., 2024, arXiv 2407.08608) for Hopper GPUs.

    The signatures of the module's functions have changed, those of the operators that it registers
    have not: they are called, with names. Tensors are `(B, L, N, H)`, the diagonal is aligned
    bottom-right, and lse comes without splitting keys, which `num_splits` of 0 would decide on.
    """

    name = "flash_attn3"

    def operators(self) -> Any:
        """The namespace that has `fwd` and `bwd`."""
        return flash

    def missing_package(self) -> str | None:
        """The reason why the operators are not there, or `None`."""
        return _missing_package()

    def build_flags(self) -> dict[str, bool]:
        """What the build says that it leaves out; nothing in older ones."""
        return _build_flags()

    def missing(self) -> str | None:
        missing = no_gpu(9) or self.missing_package()
        return missing or _left_out(self.build_flags(), "VARLEN", "BACKWARD")

    def supports(self, problem: Problem) -> str | None:
        if reason := gpu_limits(problem) or one_head_dim(problem, 256):
            return reason
        if reason := _left_out_of(self.build_flags(), problem):
            return reason
        is_deterministic = problem.determinism != "off"
        if problem.head_dim > 192 and is_deterministic:
            return f"it has no deterministic gradients of a head dim of {problem.head_dim}"
        if problem.grouped and is_deterministic:
            # Those wait for counters that builds before September 2025 do not set: they hang.
            return (
                "deterministic gradients of grouped-query keys hang in builds before September "
                "2025, which cannot be told from later ones"
            )
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Result:
        more = {**lengths(band.segments, q.device), **_options(band)}
        if band.in_flight and "sm_margin" in _arguments(self.operators().fwd):
            more["sm_margin"] = SM_MARGIN
        # Keys in one split: with 0 it might choose several, whose lse are apart.
        out, lse, *_ = self.operators().fwd(q, k, v, num_splits=1, **more)
        return out, lse

    def attend_backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, band: Band
    ) -> Gradients:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.operators().bwd(
            *(saved.grad_out, q, k, v, saved.out, saved.lse, *grads),
            **lengths(band.segments, q.device),
            **_options(band),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads


class PagedFlashAttn3(PagedKernel):
    """The forward operator over page tables, with pages of any size."""

    name = "flash_attn3"

    def missing(self) -> str | None:
        missing = no_gpu(9) or _missing_package()
        return missing or _left_out(_build_flags(), "PAGEDKV", "VARLEN")

    def supports(self, problem: Problem, block: int) -> str | None:
        reason = gpu_limits(problem) or one_head_dim(problem, 256)
        return reason or _left_out_of(_build_flags(), problem)

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        tables, lengths = pages.on(query.device)
        # Few queries leave most of a GPU idle, so it may split the keys; it merges them itself.
        out, lse, *_ = flash.fwd(
            *(query, key_blocks, value_blocks),
            page_table=tables,
            seqused_k=lengths,
            softmax_scale=scores.scale,
            softcap=scores.softcap,
            num_splits=0,
        )
        return out, lse


def _missing_package() -> str | None:
    try:
        load("flash_attn_interface")
    except ModuleNotFoundError as error:
        if error.name == "flash_attn_interface":
            return "flash attention 3, the module flash_attn_interface, is not installed"
        return f"the module flash_attn_interface does not load: {error}"
    except Exception as error:  # one that is broken may raise what it likes
        return f"the module flash_attn_interface does not load: {error}"
    if not (hasattr(flash, "fwd") and hasattr(flash, "bwd")):
        return "this flash_attn_interface is too old: it registers no torch.ops.flash_attn_3"
    return None


def _left_out(flags: dict[str, bool], *features: str) -> str | None:
    """Why a build without one of these features cannot, `None` if it has them all."""
    for feature in features:
        if flags.get(f"FLASHATTENTION_DISABLE_{feature}"):
            return f"it was built with FLASH_ATTENTION_DISABLE_{feature}; build it without"
    return None


def _left_out_of(flags: dict[str, bool], problem: Problem) -> str | None:
    """Why the build cannot serve the problem; ranks of one axis have the same build."""
    needs = [("LOCAL", problem.windowed), ("SOFTCAP", bool(problem.softcap))]
    needs += [("FP16", problem.dtype == torch.float16)]
    if reason := _left_out(flags, *(feature for feature, is_needed in needs if is_needed)):
        return reason
    # A head dim runs as the next larger one that is there.
    there = [size for size in HEAD_DIMS if not _left_out(flags, f"HDIM{size}")]
    if problem.head_dim > max(there, default=0):
        return f"it was built for head dims of {there}, got {problem.head_dim}"
    return None


def _build_flags() -> dict[str, bool]:
    """What the package says of its build; older ones say nothing."""
    try:
        return dict(load("flash_attn_config").CONFIG["build_flags"])
    except Exception:  # whatever is there, the operators themselves say what they cannot
        return {}


@lru_cache(maxsize=4)
def _arguments(operator: Any) -> frozenset[str]:
    """Names of an operator's arguments, which differ between builds."""
    return frozenset(x.name for x in operator.default._schema.arguments)


def _options(band: Band) -> dict[str, object]:
    left, right = band.window
    return {
        "softmax_scale": band.scale,
        "is_causal": band.is_causal,
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
        "softcap": band.softcap,
    }
