"""Block kernels, their contract, and which of them serves a problem."""

from __future__ import annotations

from dtensor_ring.compute.kernels.kernel import Kernel
from dtensor_ring.compute.kernels.launch import Launch
from dtensor_ring.compute.kernels.problem import Problem
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
from dtensor_ring.compute.kernels.saved import Saved
from dtensor_ring.compute.kernels.scores import Scores

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
