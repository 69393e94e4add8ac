"""The paged kernels, and the choice of one."""

from __future__ import annotations

from functools import lru_cache

from dtensor_ring.compute.kernels.flash_attn2 import PagedFlashAttn2
from dtensor_ring.compute.kernels.flash_attn3 import PagedFlashAttn3
from dtensor_ring.compute.kernels.paged import PagedKernel
from dtensor_ring.compute.kernels.paged_blocks import Gathered, InPlace
from dtensor_ring.compute.kernels.problem import Problem
from dtensor_ring.compute.kernels.varlen_attn import VarlenAttn

PAGED: tuple[PagedKernel, ...] = (
    PagedFlashAttn3(),
    PagedFlashAttn2(),
    VarlenAttn(),
    InPlace(),
    Gathered(),
)
"""In the order of preference: what was written for the GPU first, what runs anywhere last."""


@lru_cache(maxsize=256)
def paged_kernel(name: str | None, problem: Problem, block: int) -> PagedKernel:
    """The named kernel, or the first that runs here and serves the problem.

    Args:
        name: of the kernel; `None` leaves the choice.
        problem: what is asked; it has the current GPU's capability.
        block: keys of a block.

    Raises:
        ValueError: if no kernel has the name, or it cannot serve the problem or the blocks.
    """
    known = {kernel.name: kernel for kernel in PAGED}
    if name is not None and name not in known:
        raise ValueError(f"unknown paged kernel {name!r}; known kernels: {', '.join(known)}")
    reasons = {}
    for kernel in known.values() if name is None else (known[name],):
        # `supports` first: it is cheap, and importing a package for nothing is not.
        reason = kernel.supports(problem, block) or kernel.missing()
        if reason is None:
            return kernel
        reasons[kernel.name] = reason
    what = f"kernel {name!r} cannot" if name else "no kernel can"
    why = "; ".join(f"{kernel}: {reason}" for kernel, reason in reasons.items())
    able = "" if name is None else "; leave kernel out, or take 'in_place', which reads any blocks"
    raise ValueError(f"{what} read these blocks ({why}){able}")
