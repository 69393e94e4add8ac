"""The command `doctor`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from dtensor_ring.command.finding import Finding, show, written
from dtensor_ring.command.self_test import self_test
from dtensor_ring.command.versions import versions
from dtensor_ring.compute.kernels import available_kernels, missing_kernel

CPU_KERNELS = ("cpu_flash", "reference")
"""Kernels that run without a GPU."""

PREBUILT = "hub:kernels-community/flash-attn2"
"""Of a kernel that runs on most GPUs, and needs no compiler."""

LAUNCH = "torchrun --nproc-per-node 2 -m dtensor_ring doctor"


def doctor(kernel: str | None = None, as_json: bool = False) -> int:
    """Print what is installed, which kernels run, and whether a ring of all ranks is right.

    Returns:
        The exit status: 1 if something is wrong, or no ring was tested for lack of a launcher.
    """
    is_launched = dist.is_torchelastic_launched()
    # Rank 0 reports; known before there is a group, which may not come about.
    is_first = dist.get_node_local_rank(0) == 0
    findings = [*versions(), *_kernels(kernel)]
    if is_launched:
        findings += self_test(kernel)
    else:
        findings.append(Finding("ring", "not tested", f"to test it: {LAUNCH}"))
    if is_first:
        _print(findings, as_json)
    if not is_launched:
        print(
            f"no ring was tested, as there are no other ranks; start it by: {LAUNCH}",
            file=sys.stderr,
        )
    return int(not is_launched or any(finding.is_bad for finding in findings))


def _print(findings: list[Finding], with_json: bool) -> None:
    if with_json:
        print(written(findings))
    else:
        show(findings)


def _kernels(asked: str | None) -> list[Finding]:
    """Each kernel, and why it does not run; wrong if that is the one that was asked for."""
    found = available_kernels()
    if asked is not None:
        try:
            found[asked] = missing_kernel(asked)
        except ValueError as error:
            return [Finding(f"kernel {asked}", str(error), is_bad=True)]
    findings = [
        Finding(f"kernel {name}", reason or "runs", is_bad=name == asked and reason is not None)
        for name, reason in found.items()
    ]
    if torch.cuda.is_available() and not _is_fast(found):
        advice = "pip install flash-attn, or test a prebuilt one: --kernel " + PREBUILT
        findings.append(Finding("kernels for this GPU", "only the slow reference", advice))
    return findings


def _is_fast(found: dict[str, str | None]) -> bool:
    """Whether a kernel of GPUs runs."""
    return any(reason is None for name, reason in found.items() if name not in CPU_KERNELS)
