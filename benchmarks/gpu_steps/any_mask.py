"""Windows, documents and layouts of many tiles: kernels with one launch for a step, and others.

Windows are on one rank, and are compared by visible pair with causal attention. Documents are on
rings of 8 ranks, one rank after the other, with all that arrives there already; they are compared
with all of the sequence on one rank. The aims are those of the fastest kernel.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf

import torch
from baselines import Stages
from torch import Tensor

from dtensor_ring import Balanced, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.command.doctor import UNMEASURED
from dtensor_ring.compute.execute import launches
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.compute.kernels.registry import preferred
from gpu_steps.alone import Attention, best_kernels, in_turns, rank_stages, seconds_of, whole_inputs
from gpu_steps.card import documents
from gpu_steps.machine import Finding, Machine, left_out
from gpu_steps.tables import name_of

CAUSAL, WINDOWS, HEAD_DIMS = Mask.causal(), (1024, 4096), (64, 128)
SHARDS = 16
"""Shards in the sequence that windows have, which is 131,072 tokens then."""
OF_CAUSAL = 0.85
"""Aim of windows, forward and with backward, of the causal rate by visible pair."""
OF_ONE_LAUNCH = 0.95, 0.93
"""Aim of rings, of the speed of the whole sequence on one rank."""
LARGEST = 2e-2
"""Part of the norm by which results of two kernels may differ."""


@torch.no_grad()
def any_mask(machine: Machine) -> Iterator[Finding]:
    for head_dim in HEAD_DIMS:
        causal = _whole(machine, head_dim, CAUSAL)
        plain = replace(causal, kernel=best_kernels(machine.device)[0])
        rates = _rates(plain, _seconds(machine, [plain])[plain.kernel])
        yield Finding(f"{_name(plain)}: {WHAT}", _shown(rates))
        for window in WINDOWS:
            mask = Mask.sliding(window // 32 if machine.is_dry else window)
            yield from _compared(machine, _whole(machine, head_dim, mask), rates)
    for attention in _rings(machine):
        yield from _compared(machine, attention)


WHAT = "TFLOP/s of visible pairs forward, with backward"


def _size(machine: Machine) -> dict[str, tuple[int, int]]:
    return {"heads": (4, 2)} if machine.is_dry else {}


def _whole(machine: Machine, head_dim: int, mask: Mask) -> Attention:
    """Attention on one rank; its kernel is left open."""
    where = "", 1, SHARDS * machine.side, Contiguous(), mask
    return Attention(*where, head_dim=head_dim, device=machine.device, **_size(machine))


def _rings(machine: Machine) -> Iterator[Attention]:
    ranks = 2 if machine.is_dry else 8
    tokens = ranks * machine.side
    cuts = documents(tokens)
    for layout, mask, of_call in (
        (Contiguous(), CAUSAL, cuts),
        (Balanced(CAUSAL, tokens, ranks, cuts), CAUSAL, cuts),
        (Striped(), CAUSAL, cuts),
        (ZigZag(), CAUSAL, cuts),
        (ZigZag(), Mask.sliding(machine.side // 2), None),
    ):
        where = "", ranks, machine.side, layout, mask, of_call
        yield Attention(*where, device=machine.device, **_size(machine))


def contenders(attention: Attention) -> list[Attention]:
    """The attention by the best kernel that launches tiles, and by those nobody has measured."""
    problem = attention.problem()
    able = [x for x in preferred(problem) if (x.missing() or x.supports(problem)) is None]
    by_tile = [x.name for x in able if not x.has_intervals][:1]
    others = [x.name for x in able if x.has_intervals or x.name in UNMEASURED]
    names = dict.fromkeys(by_tile + others)
    return [replace(attention, kernel=name) for name in names]


def _compared(
    machine: Machine, attention: Attention, causal: list[float] | None = None
) -> Iterator[Finding]:
    """What each kernel takes, and whether they agree; next to causal rates, if there are some."""
    every = contenders(attention)
    if all(f"{_name(x)}: {WHAT}" in machine.found for x in every):
        return
    if machine.left <= 0:
        yield left_out(name_of(attention))
        return
    times = _seconds(machine, every)
    best, of_what, aims = causal, "causal", (OF_CAUSAL, OF_CAUSAL)
    if causal is None:
        best, of_what, aims = _one_launch(machine, every), "one launch", OF_ONE_LAUNCH
    fastest = min(times, key=lambda name: times[name][-1])
    for one in every:
        rates = _rates(one, times[one.kernel])
        parts = [x / y for x, y in zip(rates, best, strict=True)]
        milliseconds = ", ".join(f"{1e3 * x:.2f}" for x in times[one.kernel])
        shown = f"{_shown(rates)} ({', '.join(f'{part:.0%}' for part in parts)} of {of_what})"
        found = f"{shown}; {milliseconds} ms; {num_launches(one)} launches forward"
        is_short = one.kernel == fastest and any(x < y for x, y in zip(parts, aims, strict=True))
        aim = ", ".join(f"{aim:.0%}" for aim in aims) + f" of {of_what}" if is_short else ""
        yield Finding(f"{_name(one)}: {WHAT}", found, aim)
    for one in every[1:]:
        error = _difference(every[0], one)
        what = f"{_name(one)}: next to {every[0].kernel}"
        yield Finding(what, f"off by {error:.0e}", is_wrong=not error <= LARGEST)


def _one_launch(machine: Machine, every: list[Attention]) -> list[float]:
    """The best rates of all of the sequence on one rank, forward and with backward."""
    wholes = [x.whole() for x in every]
    shards = every[0].inputs()
    runs = {
        whole.kernel: partial(seconds_of, rank_stages(whole, 0, whole_inputs(one, shards)))
        for one, whole in zip(every, wholes, strict=True)
    }
    times = in_turns(runs, machine.repeats)
    rates = [_rates(whole, times[whole.kernel]) for whole in wholes]
    return [max(x) for x in zip(*rates, strict=True)]


def _name(attention: Attention) -> str:
    return f"{attention.kernel}, {name_of(attention)}, head dim {attention.head_dim}"


def _shown(rates: list[float]) -> str:
    return ", ".join(f"{rate / 1e12:.0f}" for rate in rates)


def _rates(attention: Attention, seconds: list[float]) -> list[float]:
    """FLOPs per second, forward and with backward: seconds count from the start of both."""
    flops = 4 * attention.pairs * attention.head_dim
    return [factor * flops / x for factor, x in zip((1, 3.5), seconds, strict=True)]


def _stages(attention: Attention, rate: float | None = None) -> list[Stages]:
    """Of each rank; at an infinite rate what arrives has no content."""
    shards = attention.inputs()
    return [rank_stages(attention, rank, shards, rate) for rank in range(attention.world_size)]


def _seconds(machine: Machine, every: list[Attention]) -> dict[str, list[float]]:
    """Of all ranks together, by kernel: forward and backward, in turns."""
    runs = {x.kernel: partial(_of_all, _stages(x, inf)) for x in every}
    return in_turns(runs, machine.repeats)


def _of_all(ranks: list[Stages]) -> list[float]:
    return [sum(stage) for stage in zip(*map(seconds_of, ranks), strict=True)]


def num_launches(attention: Attention) -> int:
    """Launches of all ranks, forward."""
    kernel, total = KERNELS[attention.kernel], 0
    for rank in range(attention.world_size):
        for step in attention.plan(rank).steps:
            shape = 1, attention.shard, len(step.cols)
            is_one = kernel.has_intervals and len(step.tiles) > 0
            total += 1 if is_one else len(launches(step, shape, kernel.has_segments))
    return total


def _difference(first: Attention, second: Attention) -> float:
    """The largest difference of outputs and gradients of queries, as a part of their norm."""
    errors = []
    for ours, theirs in zip(_stages(first), _stages(second), strict=True):
        for stage in range(2):
            x, y = ours[stage]()[0], theirs[stage]()[0]
            errors.append(_norm(x - y) / max(_norm(x), 1e-30))
    return float(torch.tensor(errors).max())


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float32).item()
