"""Keys and values in eight bits: how fast they are made and come back, and whole rings of them."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dtensor_ring import Mask, ZigZag
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty
from dtensor_ring.quantised.block_scales import (
    FORMATS,
    Quantised,
    dequantise,
    dequantise_pair,
    quantise_keys,
    quantise_pair,
    quantise_values,
)
from dtensor_ring.transport.transport import TransferPolicy
from gpu_steps.alone import best_kernels, median_seconds
from gpu_steps.bandwidth import PUBLISHED
from gpu_steps.by_threads import LARGEST, error_of_ring, num_ranks
from gpu_steps.machine import Finding, Machine
from tests.rings import Case, Ring

HEADS, HEAD_DIM = 8, 128
TOKENS = 1024
"""Of all ranks of a ring."""
TIMES = 10
"""Launches that are measured together: one takes some microseconds."""
AIM = 0.6
"""Of the speed of a copy."""
KINDS = {"keys": quantise_keys, "values": quantise_values}


def eight_bits(machine: Machine) -> Iterator[Finding]:
    like = torch.empty(0, device=machine.device, dtype=machine.dtype)
    x = empty(like, (1, HEADS, machine.side, HEAD_DIM), TOKEN_MAJOR).normal_()
    copy_rate = 2 * x.nbytes / _seconds(machine, partial(torch.empty_like(x).copy_, x))
    what = f"{HEADS} heads x {machine.side} tokens x {HEAD_DIM}"
    yield Finding(f"copy of {what}, GB/s", f"{copy_rate / 1e9:.0f}")
    for format in FORMATS.values():
        for kind, quantise in KINDS.items():
            q = quantise(x, format)
            num_bytes = x.nbytes + sum(y.nbytes for y in _tensors(q))
            runs = {f"{kind} to {format.name}": partial(quantise, x, format)}
            runs[f"{kind} of {format.name}"] = partial(dequantise, q, machine.dtype)
            for name, run in runs.items():
                yield _speed(machine, name, run, num_bytes, copy_rate)
        pair = quantise_pair(x, x, format)
        num_bytes = 2 * x.nbytes + sum(y.nbytes for q in pair for y in _tensors(q))
        runs = {f"both to {format.name}, one launch": partial(quantise_pair, x, x, format)}
        runs[f"both of {format.name}, one launch"] = partial(dequantise_pair, *pair, machine.dtype)
        for name, run in runs.items():
            yield _speed(machine, name, run, num_bytes, copy_rate)
    yield from _rings(machine)


def _tensors(q: Quantised) -> list[Tensor]:
    return [x for x in (q.data, q.scales, q.means) if x is not None]


def _seconds(machine: Machine, run: Callable[[], object]) -> float:
    """Seconds of one of some launches in a row."""
    return median_seconds(lambda: [run() for _ in range(TIMES)], machine.repeats) / TIMES


def _speed(
    machine: Machine, name: str, run: Callable[[], object], num_bytes: int, copy_rate: float
) -> Finding:
    """The time by bytes is that of the memory's published speed."""
    seconds, device = _seconds(machine, run), torch.cuda.get_device_name()
    rate = num_bytes / seconds
    best = next((speed for part, speed in PUBLISHED.items() if part in device), copy_rate)
    took = f"{1e6 * seconds:.1f} us, by bytes {1e6 * num_bytes / best:.1f}"
    aim = f"{AIM:.0%} of a copy's {copy_rate / 1e9:.0f}" if rate < AIM * copy_rate else ""
    return Finding(f"{name}, GB/s", f"{rate / 1e9:.0f}; {took}", aim)


def _rings(machine: Machine) -> Iterator[Finding]:
    """Against dense attention at the keys and values that a CPU rounded."""
    tokens, kernel = 64 if machine.is_dry else TOKENS, best_kernels(machine.device)[0]
    for format in FORMATS.values():
        policy = TransferPolicy(kv_dtype=format.dtype)
        ring = Ring(ZigZag(), num_ranks(machine), tokens, Mask.causal())
        case = Case(ring, machine.dtype, head_dims=(64, 64), kernel=kernel, policy=policy)
        error = error_of_ring(case, machine.device)
        what = f"{num_ranks(machine)} threads in {format.name}, {kernel}"
        is_wrong = not error <= LARGEST[machine.dtype]
        yield Finding(what, f"off by {error:.0e}", is_wrong=is_wrong)
