"""Block kernels, and which of them serves a problem."""

from __future__ import annotations

from dtensor_ring.kernels.cpu_flash import CpuFlash
from dtensor_ring.kernels.cuda_flash import CudaFlash
from dtensor_ring.kernels.cudnn import Cudnn
from dtensor_ring.kernels.flash_attn2 import FlashAttn2
from dtensor_ring.kernels.flash_attn3 import FlashAttn3
from dtensor_ring.kernels.flash_attn4 import FlashAttn4
from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.kernels.reference import Reference

__all__ = ["KERNELS", "Kernel", "Problem", "available_kernels", "check_kernel", "select_kernel"]

_ORDER = (
    FlashAttn3(),
    FlashAttn4(),
    Cudnn(),
    FlashAttn2(),
    CudaFlash(),
    CpuFlash(),
    Reference(),
)

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ORDER}
"""By name, in order of preference: by published speed, on the machines where a kernel runs at all.

Flash attention 3 is written for Hopper and runs nowhere else; so 4 leads on Blackwell, which it is
written for, and on Hopper where 3 is not installed. cuDNN comes next on both, and flash attention 2
is for the GPUs before. What cannot run on a machine says so by `missing()` and drops out.
"""


def available_kernels() -> dict[str, str | None]:
    """Every kernel by name, best first: `None` if it runs on this machine, else why it cannot.

    >>> available_kernels()["reference"] is None
    True
    """
    return {name: kernel.missing() for name, kernel in KERNELS.items()}


def check_kernel(name: str | None) -> None:
    """Refuse a name that no kernel has; `None` leaves the choice."""
    if name is not None and name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}; known kernels: {', '.join(KERNELS)}")


def select_kernel(name: str | None, problem: Problem) -> Kernel:
    """The named kernel, or the first that runs here and serves the problem.

    Raises:
        ValueError: if there is no kernel of that name, or it cannot serve the problem.
    """
    check_kernel(name)
    reasons = {}
    for kernel in KERNELS.values() if name is None else (KERNELS[name],):
        reason = kernel.supports(problem) or kernel.missing()
        if reason is None:
            return kernel
        reasons[kernel.name] = reason
    what = f"kernel {name!r} cannot" if name else "no kernel can"
    why = "; ".join(f"{kernel}: {reason}" for kernel, reason in reasons.items())
    raise ValueError(f"{what} serve this attention ({why})")
