"""Versions, and the kernels that run."""

from collections.abc import Iterator

from dtensor_ring import available_kernels
from dtensor_ring.lab.report import versions
from gpu_steps.machine import Finding, Machine

ABSENT = ("is not installed", "compute capability", "no CUDA device")
"""Parts of reasons that say no more than that a kernel is not there; others are faults."""


def installed(machine: Machine) -> Iterator[Finding]:
    for found in versions():
        yield Finding(found.what, found.found)
    for name, reason in available_kernels().items():
        is_absent = reason is not None and any(part in reason for part in ABSENT)
        is_wrong = reason is not None and (not is_absent or name in machine.expected)
        yield Finding(f"kernel {name}", reason or "runs", is_wrong=is_wrong)
