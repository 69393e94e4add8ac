"""Limits that the GPU kernels share: the GPUs they need, and what none of them supports."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType

import torch

from dtensor_ring.compute.kernels.kernel import Problem


def no_gpu(*majors: int) -> str | None:
    """Return why the current GPU cannot run a kernel, or `None`.

    Args:
        majors: major compute capabilities that the kernel supports; by default 8 and later.
    """
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major in majors or (not majors and major >= 8):
        return None
    wanted = " or ".join(f"{wanted}.x" for wanted in majors) or "8.0"
    return f"it needs compute capability {wanted}, this GPU has {major}.{minor}"


def gpu_limits(problem: Problem) -> str | None:
    """Return why no GPU kernel serves the problem, or `None` if some may."""
    if problem.device_type != "cuda":
        return f"it runs on CUDA, the tensors are on {problem.device_type}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {problem.dtype}"
    # They take the maximum before scaling; it stays the maximum only under a positive scale.
    if problem.scale <= 0:
        return f"it needs a positive scale, got {problem.scale}"
    return "it has no gradient of lse" if problem.differentiable_lse else None


def one_head_dim(problem: Problem, largest: int) -> str | None:
    """Return why a kernel that needs one head dim up to `largest` cannot serve, or `None`."""
    if problem.head_dim != problem.value_head_dim:
        return (
            "it needs one head dim for query, key and value, "
            f"got {problem.head_dim} and {problem.value_head_dim}"
        )
    if problem.head_dim % 8 or problem.head_dim > largest:
        return (
            f"it needs a head dim that is a multiple of 8 up to {largest}, got {problem.head_dim}"
        )
    return None


def load(module: str) -> ModuleType:
    """Import a package of kernels and ignore its warnings."""
    with warnings.catch_warnings():
        # Under `-W error` a warning would keep the package from loading in this process.
        warnings.simplefilter("ignore")
        return import_module(module)
