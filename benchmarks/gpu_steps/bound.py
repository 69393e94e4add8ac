"""The exact tiles of a ring of 8 ranks x 8k tokens on one GPU, with all that arrives there already.

What is left of the speed of one launch is what docs/speed.md calls the bound. A trace says which
kernels the rest went to.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import inf

import torch
from baselines import Stages

from dtensor_ring import Mask, TransferPolicy, ZigZag
from gpu_steps.alone import Attention, best_kernels, in_turns, rank_stages, seconds_of, whole_inputs
from gpu_steps.machine import Finding, Machine
from gpu_steps.tables import AIMS, name_of
from gpu_steps.traces import seconds_by_kind

NUM_PARTS = (2, None, 8)
PUBLISHED = {
    "flash_attn2": "flash attention 2",
    "cuda_flash": "flash attention 2",
    "flash_attn3": "flash attention 3",
    "flash_attn4": "flash attention 4",
}
"""Names in docs/speed.md; PyTorch's own kernel is flash attention 2."""


@torch.no_grad()
def bound(machine: Machine) -> Iterator[Finding]:
    size = {"heads": (4, 2), "head_dim": 64} if machine.is_dry else {}
    ranks = 2 if machine.is_dry else 8
    for kernel in best_kernels(machine.device):
        where = kernel, ranks, machine.side, ZigZag(), Mask.causal()
        attention = Attention(*where, device=machine.device, **size)  # type: ignore[arg-type]
        if f"{_name(attention)}, forward by kernel" not in machine.found:
            yield from _of_kernel(machine, attention)


def _name(attention: Attention) -> str:
    return f"{attention.kernel}, {name_of(attention)}"


def _of_kernel(machine: Machine, attention: Attention) -> Iterator[Finding]:
    shards, name = attention.inputs(), _name(attention)
    single = rank_stages(attention.whole(), 0, whole_inputs(attention, shards))
    rings = {
        num: [
            rank_stages(attention, rank, shards, inf, TransferPolicy(num_parts=num))
            for rank in range(attention.world_size)
        ]
        for num in NUM_PARTS
    }
    contenders = {"single": partial(seconds_of, single)}
    contenders |= {str(num): partial(_seconds_of_all, ranks) for num, ranks in rings.items()}
    times = in_turns(contenders, machine.repeats)
    for num in NUM_PARTS:
        pairs = zip(times["single"], times[str(num)], strict=True)
        yield _speed(f"{name}, num_parts={num}", [x / y for x, y in pairs], attention, num)
    for stage, what in enumerate(("forward", "backward")):
        kinds = _by_kind(machine, rings[None], stage)
        yield Finding(f"{name}, {what} by kernel", kinds)


def _seconds_of_all(ranks: list[Stages]) -> list[float]:
    return [sum(stage) for stage in zip(*map(seconds_of, ranks), strict=True)]


def _speed(what: str, speeds: list[float], attention: Attention, num: int | None) -> Finding:
    """Of the ring next to one launch, forward and with backward."""
    found = f"{speeds[0]:.1%} of one launch forward, {speeds[1]:.1%} with backward"
    # Eight parts are what the aim was set for; fewer of them say what memory buys.
    is_short = num == NUM_PARTS[-1] and any(x < y for x, y in zip(speeds, AIMS, strict=True))
    aim = f"{AIMS[0]:.0%} forward, {AIMS[1]:.0%} with backward" if is_short else ""
    return Finding(what, found + published(torch.cuda.get_device_name(), attention, num), aim)


def published(gpu: str, attention: Attention, num_parts: int | None) -> str:
    """What published speeds leave, where docs/speed.md has this GPU, kernel and size."""
    from tests.roofline import GPUS, RANKS, SHARD, bound

    if (attention.world_size, attention.shard) != (RANKS, SHARD):
        return ""
    for one in GPUS:
        card, _, kernel = one.name.partition(", ")
        if card in gpu and kernel == PUBLISHED.get(attention.kernel):
            parts = [bound(one, num_parts, stages) for stages in range(1, 1 + len(one.flops))]
            return f"; published speeds leave {' and '.join(f'{part:.1%}' for part in parts)}"
    return ""


def _by_kind(machine: Machine, ranks: list[Stages], stage: int) -> str:
    """Milliseconds of all ranks by what kernels are for."""
    run: list[Callable[[], object]] = []
    for stages in ranks:
        if stage:
            stages[0]()  # whose results backward takes
        run.append(stages[stage])
    spans = machine.spans_of(lambda: [one() for one in run])
    total = sum(seconds_by_kind(spans).values())
    parts = seconds_by_kind(spans).items()
    return ", ".join(f"{kind} {1e3 * x:.2f} ms ({x / total:.1%})" for kind, x in parts)
