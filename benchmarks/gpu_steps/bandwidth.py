"""How fast partials are merged, next to a copy, and a copy next to the memory's published speed."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dtensor_ring.compute.memory import (
    HEAD_MAJOR,
    TOKEN_MAJOR,
    WHOLE,
    Accumulation,
    Order,
    Partial,
    Region,
    empty,
    region,
)
from dtensor_ring.compute.merge import accumulate_sums
from gpu_steps.alone import median_seconds
from gpu_steps.machine import Finding, Machine

HEADS, HEAD_DIM = 32, 128
PUBLISHED = {"H100": 3.35e12, "H200": 4.8e12, "B200": 8e12}
"""Bytes per second of the memory, by a part of the GPU's name."""
AIM = 0.88
"""Of a copy: a copy itself reaches 86 % of what is published of an H200."""


def bandwidth(machine: Machine) -> Iterator[Finding]:
    whole = torch.randn(1, HEADS, machine.side, HEAD_DIM, device=machine.device)
    copied = torch.empty_like(whole)
    rate = 2 * whole.nbytes / median_seconds(partial(copied.copy_, whole), machine.repeats)
    name = torch.cuda.get_device_name()
    published = next((speed for part, speed in PUBLISHED.items() if part in name), rate)
    yield Finding("copy, GB/s", f"{rate / 1e9:.0f} of {published / 1e9:.0f}")
    half = region(None, (machine.side // 2, machine.side))
    for what, order in (("token-major", TOKEN_MAJOR), ("head-major", HEAD_MAJOR)):
        for number in (2, 4, 8):
            yield _merge(machine, f"{number} parts, {what}", order, [WHOLE] * number, rate)
        yield _merge(machine, f"a whole and 3 halves, {what}", order, [WHOLE, *[half] * 3], rate)


def _merge(
    machine: Machine, what: str, order: Order, regions: list[Region], copy_rate: float
) -> Finding:
    shape = 1, HEADS, machine.side, HEAD_DIM
    parts = [_part(machine, at, order) for at in regions]
    target = empty(parts[0].x, shape, order)
    lse = torch.empty(shape[:3], device=machine.device)
    moved: list[Tensor] = [target, lse]
    for part in parts:
        assert part.lse is not None
        moved += [part.x, part.lse]
    merge = partial(accumulate_sums, Accumulation(target, parts, lse))
    rate = sum(x.nbytes for x in moved) / median_seconds(merge, machine.repeats)
    aim = f"{AIM:.0%} of {copy_rate / 1e9:.0f} GB/s" if rate < AIM * copy_rate else ""
    return Finding(f"merge of {what}, GB/s", f"{rate / 1e9:.0f}", aim)


def _part(machine: Machine, at: Region, order: Order) -> Partial:
    rows = len(range(*at[2].indices(machine.side)))
    like = torch.empty(0, device=machine.device, dtype=machine.dtype)
    x = empty(like, (1, HEADS, rows, HEAD_DIM), order).normal_()
    return Partial(at, x, torch.randn(1, HEADS, rows, device=machine.device))
