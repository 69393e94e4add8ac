"""Flash attention 3: the module `flash_attn_interface`, built from flash-attn's `hopper` folder."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import (
    Gradients,
    PagedKernel,
    Pages,
    Problem,
    Result,
    Saved,
    Scores,
    gpu_limits,
    load,
    no_gpu,
    one_head_dim,
)
from dtensor_ring.compute.kernels.varlen import Band, VarlenKernel, lengths

flash = torch.ops.flash_attn_3


class PagedFlashAttn3(PagedKernel):
    """The forward operator, which reads keys through page tables; pages may have any size."""

    name = "flash_attn3"

    def missing(self) -> str | None:
        missing = no_gpu(9) or _missing_package()
        return missing or _left_out(_build_flags(), ["PAGEDKV", "VARLEN"])

    def supports(self, problem: Problem, block: int) -> str | None:
        reason = gpu_limits(problem) or one_head_dim(problem, 256)
        return reason or _left_out_of(_build_flags(), problem)

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        tables, lengths = pages.on(query.device)
        # Few queries leave most of a GPU idle, so let it split the keys; it merges the splits.
        out, lse, *_ = flash.fwd(
            query,
            key_blocks,
            value_blocks,
            page_table=tables,
            seqused_k=lengths,
            softmax_scale=scores.scale,
            softcap=scores.softcap,
            num_splits=0,
        )
        return out, lse


# Multiprocessors that a forward leaves to messages in flight. A forward runs one block on each of
# the others until the tile is done, and NCCL's kernels cannot share a multiprocessor with it. So
# without a margin, a message that starts after the tile waits for its end. Backward needs no
# margin, as its blocks end one by one. Eight of an H100's 132 is a guess that was not measured.
SM_MARGIN = 8


class FlashAttn3(VarlenKernel):
    """Flash attention 3 (Shah et al., 2024, arXiv 2407.08608) for Hopper GPUs.

    We call the operators that the module registers, with named arguments: the signatures of its
    functions have changed, those of the operators have not. Tensors are `(B, L, N, H)`, and the
    diagonal is aligned bottom-right. `num_splits` is 1; 0 would let the operator split keys.
    """

    name = "flash_attn3"
    paged = PagedFlashAttn3()

    def operators(self) -> Any:
        """Return the namespace that has `fwd` and `bwd`."""
        return flash

    def missing_package(self) -> str | None:
        """Return why the operators are missing, or `None`."""
        return _missing_package()

    def build_flags(self) -> dict[str, bool]:
        """Return the flags of features that the build leaves out; empty for older builds."""
        return _build_flags()

    def missing(self) -> str | None:
        missing = no_gpu(9) or self.missing_package()
        return missing or _left_out(self.build_flags(), ["VARLEN", "BACKWARD"])

    def supports(self, problem: Problem) -> str | None:
        if reason := gpu_limits(problem) or one_head_dim(problem, 256):
            return reason
        if reason := _left_out_of(self.build_flags(), problem):
            return reason
        is_deterministic = problem.determinism != "off"
        if problem.head_dim > 192 and is_deterministic:
            return f"it has no deterministic gradients of a head dim of {problem.head_dim}"
        if problem.grouped and is_deterministic:
            # They wait for counters that builds before September 2025 do not set, and hang.
            return (
                "deterministic gradients of grouped-query keys hang in builds before September "
                "2025, which cannot be distinguished from later ones"
            )
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Result:
        more = {**lengths(band.segments, q.device), **_options(band)}
        if band.in_flight and "sm_margin" in _arguments(self.operators().fwd):
            more["sm_margin"] = SM_MARGIN
        # Keep keys in one split: 0 may choose several, each with an lse of its own.
        out, lse, *_ = self.operators().fwd(q, k, v, num_splits=1, **more)
        return out, lse

    def attend_backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, band: Band
    ) -> Gradients:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.operators().bwd(
            saved.grad_out,
            q,
            k,
            v,
            saved.out,
            saved.lse,
            dq,
            dk,
            dv,
            **lengths(band.segments, q.device),
            **_options(band),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def _missing_package() -> str | None:
    try:
        load("flash_attn_interface")
    except ModuleNotFoundError as error:
        if error.name == "flash_attn_interface":
            return "flash attention 3, the module flash_attn_interface, is not installed"
        return f"the module flash_attn_interface does not load: {error}"
    except Exception as error:  # a broken module may raise anything
        return f"the module flash_attn_interface does not load: {error}"
    if not (hasattr(flash, "fwd") and hasattr(flash, "bwd")):
        return "this flash_attn_interface is too old: it registers no torch.ops.flash_attn_3"
    return None


def _left_out(flags: dict[str, bool], features: list[str]) -> str | None:
    """Return which of these features the build lacks, as a reason, or `None`."""
    for feature in features:
        if flags.get(f"FLASHATTENTION_DISABLE_{feature}"):
            return f"it was built with FLASH_ATTENTION_DISABLE_{feature}; build it without"
    return None


# Head dims that kernels are built for.
HEAD_DIMS = (64, 96, 128, 192, 256)


def _left_out_of(flags: dict[str, bool], problem: Problem) -> str | None:
    """Return why the build cannot serve the problem, or `None`. All ranks have the same build."""
    needs = [("LOCAL", problem.windowed), ("SOFTCAP", bool(problem.softcap))]
    needs += [("FP16", problem.dtype == torch.float16)]
    if reason := _left_out(flags, [feature for feature, is_needed in needs if is_needed]):
        return reason
    # A head dim runs as the next larger one of the build.
    there = [size for size in HEAD_DIMS if not _left_out(flags, [f"HDIM{size}"])]
    if problem.head_dim > max(there, default=0):
        return f"it was built for head dims of {there}, got {problem.head_dim}"
    return None


def _build_flags() -> dict[str, bool]:
    """Return the build flags that the package reports; empty for older packages."""
    try:
        return dict(load("flash_attn_config").CONFIG["build_flags"])
    except Exception:  # without flags, the operators themselves refuse what they lack
        return {}


@lru_cache(maxsize=4)
def _arguments(operator: Any) -> frozenset[str]:
    """Return the names of an operator's arguments, which differ between builds."""
    return frozenset(x.name for x in operator.default._schema.arguments)


def _options(band: Band) -> dict[str, object]:
    left, right = band.window
    return {
        "softmax_scale": band.scale,
        "is_causal": band.is_causal,
        # The package writes -1 for a side without a bound.
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
        "softcap": band.softcap,
    }
