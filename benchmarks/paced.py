"""A kernel that computes nothing and waits as long as a real one takes on a free core.

Four ranks on two cores slow each other down as no ranks of a real machine do: whoever waits for a
message leaves the others a core. With this kernel they do not, so their messages can be measured.
"""

import time

import torch
from torch import Tensor

from dtensor_ring import register_kernel
from dtensor_ring.compute.kernels import Kernel, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Gradients, Launch, Problem, Result
from dtensor_ring.compute.kernels.registry import KERNELS
from dtensor_ring.lab.recorded import form_of
from dtensor_ring.planning.tile import Tile

RATES = {"full": 120e9, "causal": 90e9, "window": 75e9}
"""FLOPs per second by the form of a tile, about those of `cpu_flash` on a core."""
LAUNCH = 100e-6
"""Seconds of a launch."""


class PacedKernel(Kernel):
    """Returns zeros when its time is over."""

    name = "paced"

    def missing(self) -> None:
        return None

    def supports(self, problem: Problem) -> str | None:
        return None if problem.device_type == "cpu" else "it is for CPUs"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        end = time.perf_counter() + seconds(q, k, launch, 4)
        result = torch.zeros_like(q), q.new_zeros(q.shape[:3])
        wait_until(end)
        return result

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        end = time.perf_counter() + seconds(q, k, launch, 10)
        dq, dk, dv = map(torch.zeros_like, (q, k, v))
        wait_until(end)
        return dq, dk, dv


def seconds(q: Tensor, k: Tensor, launch: Launch, flops: int) -> float:
    """Return the seconds of a tile: `flops` for each visible pair and each number of a head."""
    area = Tile((0, q.shape[2]), (0, k.shape[2]), launch.mask).area
    return LAUNCH + flops * area * q.shape[1] * q.shape[3] / RATES[form_of(launch.mask)]


def wait_until(end: float) -> None:
    """Leave the core to others."""
    time.sleep(max(0.0, end - time.perf_counter()))


def register() -> None:
    """Make the kernel known, once in a process."""
    if PacedKernel.name not in KERNELS:
        register_kernel(PacedKernel())
