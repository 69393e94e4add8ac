"""Block kernels, their contract, and the choice of a kernel for a problem."""

from __future__ import annotations

from dtensor_ring.compute.kernels.kernel import Kernel, Launch, Problem, Saved, Scores
from dtensor_ring.compute.kernels.registry import (
    KERNELS,
    available_kernels,
    check_kernel,
    clear_kernel_cache,
    kernel_for,
    missing_kernel,
    named_kernel,
    register_kernel,
    select_kernel,
)

__all__ = [
    "KERNELS",
    "Kernel",
    "Launch",
    "Problem",
    "Saved",
    "Scores",
    "available_kernels",
    "check_kernel",
    "clear_kernel_cache",
    "kernel_for",
    "missing_kernel",
    "named_kernel",
    "register_kernel",
    "select_kernel",
]
