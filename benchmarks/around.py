"""Measure what the ring adds on CPUs around kernels that take no time, next to bare transfers.

Run ``python benchmarks/around.py``: it starts its processes itself, prints a table, and writes it
with every single time to ``benchmarks/results``. With ``--quick`` it takes less than a minute and
writes to ``out`` instead. Everything compared is timed in turns. Leave the machine alone meanwhile.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from baselines import Stages, StubKernels, time_paired, transfers
from harness import HEAD_DIM, ORDERS, is_quick
from rich.console import Console
from ring import (
    SETTING,
    Case,
    Columns,
    Measurement,
    random_inputs,
    run,
    shards_of,
    table,
    torch_rings,
    write_card,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.compute.kernels import Kernel, Saved, Scores
from dtensor_ring.ops.options import default_scale
from dtensor_ring.planning.layout import ZigZag
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport.transport import ProcessGroupTransport


def cases(quick: bool) -> list[Case]:
    """Groups of processes, and tensors token by token and head by head."""
    orders = list(ORDERS)[:1] if quick else list(ORDERS)
    return [
        Case(world_size, 16384, "float32", order, True, 5 if quick else 30)
        for world_size in (2, 4, 8)
        for order in orders
    ]


class StubKernel(Kernel):
    """A kernel that computes nothing."""

    name = "stub"

    def __init__(self) -> None:
        self.forwards, self.backwards = StubKernels(), StubKernels()

    def missing(self) -> None:
        return None

    def supports(self, problem: object) -> None:
        return None

    def forward(self, query: Tensor, *_: Any) -> Any:
        return self.forwards.forward(query)

    def backward(self, saved: Saved, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
        return self.backwards.backward(query=query, key=key, value=value)


def ring_stages(
    kernel: Kernel, mine: Plan, shards: list[Tensor], group: dist.ProcessGroup
) -> Stages:
    """Our ring by that plan, around that kernel."""
    grad_out, query, *rest = shards
    pair, transport = (rest[0], rest[1]), ProcessGroupTransport(group)
    scores = Scores(Mask.causal(), default_scale(HEAD_DIM))
    stubs = [kernel.forwards, kernel.backwards] if isinstance(kernel, StubKernel) else []
    kept: list[Tensor] = []

    def forward() -> list[Tensor]:
        for stub in stubs:
            stub.restart()
        kept[:] = ring_forward(query, pair, mine, kernel, scores, transport)
        return kept[:1]

    def backward() -> tuple[Tensor, ...]:
        for stub in stubs:
            stub.restart()
        saved = Saved(grad_out, *kept)
        return ring_backward(saved, query, pair, mine, kernel, scores, transport)

    return forward, backward


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    group = mesh.get_group()
    shards = shards_of(case, random_inputs(case), group.rank())
    mine = plan(ZigZag(), Mask.causal(), group.rank(), case.world_size, case.seq_len)
    contenders = torch_rings(case, mesh, shards) | {
        "ours": ring_stages(StubKernel(), mine, shards, group),
        "bare": transfers(group, *shards[2:]),
    }
    barrier = partial(dist.barrier, group)
    return Measurement(case, time_paired(contenders, case.repeats, barrier, warmups=3))


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(f"\n{SETTING}\n`bare` are the transfers of whole shards, and nothing else.\n")
    console.print("## 16,384 tokens, float32")
    columns: Columns = {
        "ranks": lambda case: str(case.world_size),
        "memory order": lambda case: case.order,
    }
    console.print(table(measurements, columns, ["ours", "torch", "gathered", "bare"]))


def main() -> None:
    quick = is_quick(__doc__)
    title = "The ring around kernels that take no time"
    write_card("around", title, quick, lambda: run(cases(quick), measure), report)


if __name__ == "__main__":
    main()
