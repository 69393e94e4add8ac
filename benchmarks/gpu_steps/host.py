"""The host's time of a call next to that of PyTorch's own attention on the same tensors."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from dtensor_ring import Mask, SequenceAxis, ring_attention
from gpu_steps.machine import Finding, Machine

TOKENS, HEADS, HEAD_DIM = 128, 8, 64
"""Few, so that the GPU waits for the host."""
TIMES, REPEATS = 100, 9
AIM = 2.0
"""Times PyTorch's time, forward and backward."""


def host(machine: Machine) -> Iterator[Finding]:
    generator = torch.Generator().manual_seed(0)
    shape = 1, TOKENS, HEADS, HEAD_DIM
    inputs = [
        torch.randn(shape, generator=generator)
        .to(machine.device, machine.dtype)
        .transpose(1, 2)
        .requires_grad_()
        for _ in range(3)
    ]
    grad_out = torch.ones_like(inputs[0])
    with machine.connected() as mesh:
        SequenceAxis(mesh, "zigzag")
        calls: dict[str, Callable[..., Any]] = {
            "PyTorch's attention": partial(F.scaled_dot_product_attention, is_causal=True),
            "ring_attention on one rank": partial(ring_attention, mask=Mask.causal(), mesh=mesh),
        }
        runs = {name: partial(_both, call, inputs, grad_out) for name, call in calls.items()}
        times = _seconds(machine, runs)
    of_torch, ours = times.values()
    for name, seconds in times.items():
        aim = f"{AIM} times PyTorch's" if seconds is ours and ours > AIM * of_torch else ""
        found = f"{1e6 * seconds:.0f} us forward and backward, {seconds / of_torch:.2f} times"
        yield Finding(f"the host's time of {name}", found, aim)


def _both(call: Callable[..., Any], inputs: list[Any], grad_out: Any) -> None:
    torch.autograd.grad(call(*inputs), inputs, grad_out)


def _seconds(machine: Machine, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median of some turns, each of many calls that nothing waits for."""
    times = 2 if machine.is_dry else TIMES
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + (1 if machine.is_dry else REPEATS)):
        for name, run in runs.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(times):
                run()
            found[name].append((time.perf_counter() - begin) / times)
    torch.cuda.synchronize()
    return {name: median(seconds[1:]) for name, seconds in found.items()}
