"""Measure what a fixed order of sums costs on two ranks, beside the default order.

Run ``python benchmarks/fixed_order.py``: it starts its processes itself, prints a table, and writes
it with every single time to ``benchmarks/results``. With ``--quick`` it measures short sequences
and writes to ``out`` instead. Both orders are timed in turns, and ratios are medians of the ratios
of neighbouring times, between the smallest and the largest. Leave the machine alone meanwhile.
"""

from functools import partial

import torch
import torch.distributed as dist
from baselines import time_paired
from harness import HEAD_DIM, NUM_HEADS, STAGES, is_quick, table_of
from rich.console import Console
from ring import Case, Measurement, affordable, our_ring, random_inputs, run, shards_of, write_card
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy

POLICIES = {"default": DEFAULT_POLICY, "fixed": TransferPolicy(order="fixed")}
SETTING = (
    f"Causal, zigzag, batch 1, {NUM_HEADS} heads of {HEAD_DIM}, gloo, one thread a rank. "
    "Milliseconds are medians of n turns;\n`fixed/default` is the median of the ratios of "
    "neighbouring times, and the least and the most of them follow."
)


def cases(quick: bool) -> list[Case]:
    """What two ranks compute."""
    repeats = {4096: 2} if quick else {16384: 7}
    return [
        Case(2, seq_len, dtype, "B, L, N, H", False, number)
        for seq_len, number in repeats.items()
        for dtype in ("float32", "bfloat16")
    ]


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    """Time both orders on the same shards."""
    group = mesh.get_group()
    shards = shards_of(case, random_inputs(case), group.rank())
    rings = {name: our_ring(case, shards, group, policy) for name, policy in POLICIES.items()}
    tolerance = 1e-4 if case.dtype == "float32" else 5e-2

    def agree() -> None:
        default, fixed = ([x for stage in stages for x in stage()] for stages in rings.values())
        torch.testing.assert_close(fixed, default, atol=tolerance, rtol=tolerance)

    case = affordable(case, agree)
    barrier = partial(dist.barrier, group)
    return Measurement(case, time_paired(rings, case.repeats, barrier, warmups=0))


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(f"\n{SETTING}\n")
    table = table_of(
        ["tokens", "dtype", "what"],
        ["n", "default ms", "fixed ms", "fixed/default", "least", "most"],
    )
    for m in measurements:
        for stage, what in enumerate(STAGES):
            fixed, default = (m.seconds[name][stage] for name in ("fixed", "default"))
            ratios = [x / y for x, y in zip(fixed, default, strict=True)]
            numbers = [m.ratio("fixed", "default", stage), min(ratios), max(ratios)]
            table.add_row(
                *(f"{m.case.seq_len:,}", m.case.dtype, what, str(len(ratios))),
                *(f"{m.milliseconds(name, stage):.1f}" for name in POLICIES),
                *(f"{x:.3f}" for x in numbers),
            )
    console.print(table)


def main() -> None:
    quick = is_quick(__doc__)
    title = "A fixed order of sums on CPUs"
    write_card("fixed_order", title, quick, lambda: run(cases(quick), measure), report)


if __name__ == "__main__":
    main()
