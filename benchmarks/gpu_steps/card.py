"""Rings of 4 and 8 ranks on one GPU: what they add to a kernel on the whole sequence.

The ranks of a ring run one after the other, and what they would receive is copied on the device,
comes over a link that is emulated, or is there already.
"""

from collections.abc import Iterator
from functools import partial
from math import inf
from random import Random
from typing import Any

import torch
from baselines import Stages
from torch import Tensor

from dtensor_ring import Balanced, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.planning.layout import Layout
from gpu_steps.alone import (
    Attention,
    best_kernels,
    in_turns,
    merge_share,
    positions_of,
    rank_stages,
    seconds_of,
    torch_stages,
    whole_inputs,
)
from gpu_steps.machine import Finding, Machine, left_out
from gpu_steps.tables import AIMS, Overlap, Row, name_of

CAUSAL, WINDOW = Mask.causal(), Mask.sliding(4096)
NUM_DOCUMENTS = 16
RATES = (400e9, 100e9, 50e9, 25e9)
"""Bytes per second of links."""
MAX_SECONDS = 220
"""Seconds, so that other steps have theirs."""


def documents(seq_len: int) -> tuple[int, ...]:
    """Boundaries of documents of uneven length, always the same."""
    return 0, *sorted(Random(0).sample(range(1, seq_len), NUM_DOCUMENTS - 1)), seq_len


def attentions(machine: Machine) -> Iterator[tuple[Attention, int]]:
    """The attention to measure, most telling first, and the number of repeats."""
    side, device = machine.side, machine.device
    if machine.is_dry:
        dims = {"heads": (4, 2), "head_dim": 64, "device": device}
        for layout, cuts in ((ZigZag(), None), (Contiguous(), documents(2 * side))):
            yield from _by_kernel(2, side, layout, CAUSAL, cuts, 1, **dims)
        return
    bounds = documents(8 * side)
    everywhere: list[tuple[Layout, Mask, Any]] = [
        (ZigZag(), CAUSAL, None),
        (Contiguous(), CAUSAL, bounds),
        (Balanced(CAUSAL, 8 * side, 8, bounds), CAUSAL, bounds),
        (ZigZag(), WINDOW, None),
        (Striped(), CAUSAL, None),
        (Contiguous(), CAUSAL, None),
        (Contiguous(), WINDOW, None),
        (ZigZag(), CAUSAL, bounds),
    ]
    for layout, mask, cuts in everywhere:
        yield from _by_kernel(8, side, layout, mask, cuts, 7, device=device)
    for world_size, factor, repeats in ((4, 1, 7), (8, 4, 2), (4, 16, 1)):
        shard = factor * side
        for mask, cuts in ((CAUSAL, None), (WINDOW, None), (CAUSAL, documents(world_size * shard))):
            found = _by_kernel(world_size, shard, ZigZag(), mask, cuts, repeats, device=device)
            yield from list(found)[:1]


def _by_kernel(
    world_size: int,
    shard: int,
    layout: Layout,
    mask: Mask,
    cuts: tuple[int, ...] | None,
    repeats: int,
    **dims: Any,
) -> Iterator[tuple[Attention, int]]:
    """The attention by each kernel that can, best first."""
    for name in best_kernels(dims["device"]):
        attention = Attention(name, world_size, shard, layout, mask, cuts, **dims)
        if KERNELS[name].supports(attention.problem()) is None:
            yield attention, repeats


def measure(attention: Attention, repeats: int) -> Row:
    """One launch, our ranks and those of PyTorch's ring in turns."""
    world_size, shards = attention.world_size, attention.inputs()
    single = rank_stages(attention.whole(), 0, whole_inputs(attention, shards))
    ours, there = (
        [rank_stages(attention, rank, shards, rate) for rank in range(world_size)]
        for rate in (None, inf)
    )
    contenders = {
        "single": lambda: seconds_of(single),
        "ours": lambda: _sum(map(seconds_of, ours)),
        "there": lambda: _sum(map(seconds_of, there)),
    }
    theirs: list[Stages] = []
    if attention.cu_seqlens is None and (attention.layout, attention.mask) == (ZigZag(), CAUSAL):
        theirs = [torch_stages(attention, rank, shards) for rank in range(world_size)]
        contenders["torch"] = lambda: _sum(map(seconds_of, theirs))
    for rings in (ours, theirs):
        check_agreement(attention, single, rings)
    times = in_turns(contenders, repeats)
    share = sum(map(merge_share, ours)) / world_size
    flops = [4 * attention.pairs * attention.head_dim * factor for factor in (1, 3.5)]
    seconds = [times[x] for x in ("single", "ours", "there")]
    about = attention.kernel, name_of(attention), flops
    return Row(*about, *seconds, times.get("torch"), share)


def check_agreement(attention: Attention, single: Stages, rings: list[Stages]) -> None:
    """Compare outputs and gradients of queries of each rank with those of one launch.

    Gradients of keys are sums over ranks, of which a rank alone has its own part only.
    """
    out, grad_query = single[0]()[0], single[1]()[0]
    for rank, (forward, backward) in enumerate(rings):
        positions = positions_of(attention, rank)
        for what, ours, whole in (
            ("outputs", forward()[0], out),
            ("gradients of queries", backward()[0], grad_query),
        ):
            expected = whole[:, :, positions]
            error, size = (_norm(ours - expected), _norm(expected))
            if not error <= 2e-2 * size:  # entries shrink as rows see more keys
                raise AssertionError(f"{what} of rank {rank} differ by {error} of {size}")


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float32).item()


def _sum(times: Iterator[list[float]]) -> list[float]:
    return [sum(of_stage) for of_stage in zip(*times, strict=True)]


def overlap(attention: Attention, rate: float, repeats: int) -> Overlap:
    """A rank in the middle, all of whose messages come over a link."""
    rank, shards = attention.world_size // 2, attention.inputs()
    links = {"free": None, "linked": rate}
    stages = {name: rank_stages(attention, rank, shards, given) for name, given in links.items()}
    times = in_turns({name: partial(seconds_of, x) for name, x in stages.items()}, repeats)
    num_hops = attention.plan(rank).num_received / attention.shard  # of whole shards
    shard = sum(x.numel() * x.itemsize for x in shards[2:])
    sums = 4 * shard // attention.dtype.itemsize
    transfers = [num_hops * shard / rate, num_hops * (2 * shard + sums) / rate]
    return Overlap(name_of(attention), rate, times["free"], times["linked"], transfers)


class Card:
    """What was measured, row by row until the time is over; the next run goes on from there."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.overlaps: list[Overlap] = []

    @torch.no_grad()
    def __call__(self, machine: Machine) -> Iterator[Finding]:
        end = machine.left - min(MAX_SECONDS, machine.left)
        first: Attention | None = None
        for attention, repeats in attentions(machine):
            what = f"{attention.kernel}, {name_of(attention)}"
            has_aim, first = first is None, first or attention
            if what in machine.found:
                continue
            if machine.left <= end:
                yield left_out(what)
                continue
            yield self._measured(what, attention, repeats, has_aim)
        if first and self.rows and machine.left > end and not self.overlaps:
            self.overlaps += [overlap(first, rate, machine.repeats) for rate in RATES]

    def _measured(self, what: str, attention: Attention, repeats: int, has_aim: bool) -> Finding:
        try:
            row = measure(attention, repeats)
        except torch.OutOfMemoryError:
            return Finding(what, "left out: this GPU has too little memory")
        except Exception as error:  # compilers of kernels raise what they like
            return Finding(what, f"{type(error).__name__}: {error}"[:300], is_wrong=True)
        self.rows.append(row)
        return _finding(what, row, has_aim)


def _finding(what: str, row: Row, has_aim: bool) -> Finding:
    """The aims are those of the best kernel at the first attention."""
    speeds = [row.speed(stage) for stage in range(2)]
    short = has_aim and any(speed < aim for speed, aim in zip(speeds, AIMS, strict=True))
    aim = f"{AIMS[0]:.0%} forward, {AIMS[1]:.0%} with backward" if short else ""
    found = f"{speeds[0]:.1%} of one launch forward, {speeds[1]:.1%} with backward"
    return Finding(what, found, aim)
