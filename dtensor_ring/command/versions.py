"""What is installed."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from dtensor_ring.command.finding import Finding

PACKAGES = (
    *("dtensor-ring", "torch", "triton", "flash-attn", "flash-attn-4"),
    *("transformers", "accelerate", "trl", "torchtitan"),
)
"""The project, what it needs, and what it works with."""


def versions() -> list[Finding]:
    """Versions of Python, of the packages and of the GPUs' libraries."""
    found = [Finding("Python", platform.python_version())]
    found += [Finding(name, version_of(name)) for name in PACKAGES]
    if not torch.cuda.is_available():
        return [*found, Finding("GPU", "none that torch sees")]
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    return [
        *found,
        Finding("GPU", f"{count} x {name}"),
        Finding("CUDA", str(torch.version.cuda)),
        Finding("cuDNN", str(torch.backends.cudnn.version())),
        Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version()))),
    ]


def version_of(package: str) -> str:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
