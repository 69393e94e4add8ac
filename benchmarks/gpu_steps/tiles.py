"""Tiles of a ring alone, next to one launch on the whole sequence."""

from collections.abc import Iterator
from functools import partial

from dtensor_ring import Contiguous, Mask
from dtensor_ring.compute.kernels import KERNELS, Launch, Saved
from dtensor_ring.compute.memory import WHOLE, part_of, region
from gpu_steps.alone import Attention, best_kernels, median_seconds, scores_of
from gpu_steps.machine import Finding, Machine

AIM = 0.97
"""Of the speed of one launch: what blocks leave idle in the last wave."""
RANKS = 8


def tiles(machine: Machine) -> Iterator[Finding]:
    side = machine.side
    for kernel in best_kernels(machine.device):
        whole = _speeds(machine, kernel, RANKS * side, RANKS * side, Mask.causal())
        yield _finding(f"{kernel}, one launch of {RANKS * side:,} tokens", whole, whole)
        for rows, cols, mask in (
            (side, side, Mask.causal()),
            (side, side // 2, Mask.full()),
            (side // 2, side, Mask.full()),
        ):
            speeds = _speeds(machine, kernel, rows, cols, mask)
            yield _finding(f"{kernel}, tile of {rows:,} x {cols:,}", speeds, whole)


def _finding(what: str, speeds: list[float], whole: list[float]) -> Finding:
    parts = [one / best for one, best in zip(speeds, whole, strict=True)]
    found = ", ".join(f"{speed / 1e12:.0f}" for speed in speeds)
    aim = f"{AIM:.0%} of one launch" if min(parts) < AIM else ""
    shown = ", ".join(f"{part:.0%}" for part in parts)
    return Finding(f"{what}: TFLOP/s forward, backward", f"{found} ({shown})", aim)


def _speeds(machine: Machine, kernel: str, rows: int, cols: int, mask: Mask) -> list[float]:
    """FLOPs per second, forward and backward."""
    tokens = max(rows, cols)
    attention = Attention(kernel, 1, tokens, Contiguous(), mask, device=machine.device)
    grad_out, query, key, value = attention.inputs()
    launch, scores, block = Launch(WHOLE, WHOLE, mask), scores_of(attention), KERNELS[kernel]
    grad_out, query = (part_of(x, region(None, (0, rows))) for x in (grad_out, query))
    key, value = (part_of(x, region(None, (0, cols))) for x in (key, value))
    forward = partial(block.forward, query, key, value, launch, scores)
    saved = Saved(grad_out, *forward())
    backward = partial(block.backward, saved, query, key, value, launch, scores)
    pairs = rows * (rows + 1) / 2 if mask == Mask.causal() else rows * cols
    flops = 4 * attention.heads[0] * attention.head_dim * pairs
    times = (median_seconds(run, machine.repeats) for run in (forward, backward))
    return [factor * flops / seconds for factor, seconds in zip((1, 2.5), times, strict=True)]
