"""What a call of attention costs the host, in microseconds, where there is nothing to compute.

    python benchmarks/calls.py

One process, a ring of one rank, 16 tokens: what is left is Python and the dispatcher. Two ranks are
one process, too: their messages are zeros and take no time, and calls are not compared. Calls of
both are timed with the kernel for CPUs, and with kernels that take no time: those of attention, and
of merges, which are one launch on a GPU and many operations on a CPU. Next to each call stands
the cost on top of the kernel alone. The last line says what agreement adds to a call on GPUs, where
the host does not wait for it: two ranks of this process compare calls. With ``--quick`` it takes
seconds and writes to ``out``.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import is_quick, origin, publish, table_of
from instant import Instant
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.benchmark import Timer

from dtensor_ring import Mask, SequenceAxis, ring_attention, shard_sequence
from dtensor_ring.agreement.call_record import CallRecord, CallSite
from dtensor_ring.agreement.group_state import GroupState
from dtensor_ring.agreement.late_records import Failed, LateRecords, PostedCall
from dtensor_ring.compute import merge
from dtensor_ring.compute.kernels.registry import register_kernel
from dtensor_ring.lab.training.estimate import alone
from dtensor_ring.transport.transport import P2P, NullTransport, Work, set_transport

SHAPE = 1, 4, 16, 8
DOCUMENTS = torch.tensor([0, 3, 9, 16], dtype=torch.int32)

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Cost:
    """Microseconds of a call, alone and followed by backward."""

    name: str
    forward: float
    both: float


def calls(mesh: DeviceMesh) -> dict[str, Call]:
    """The kernel alone, then what is called by users."""
    plain = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    dtensors = [shard_sequence(x.detach(), mesh, 2).requires_grad_() for x in plain]
    aten = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return {
        "the kernel": lambda: aten(*plain, 0.0, True)[0],
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
            *plain, is_causal=True
        ),
        "ring_attention": lambda: ring_attention(*plain, mesh=mesh),
        "ring_attention, no kernel": lambda: ring_attention(*plain, mesh=mesh, kernel="instant"),
        "ring_attention, full": lambda: ring_attention(*plain, mesh=mesh, mask=Mask.full()),
        "ring_attention, 3 documents": lambda: ring_attention(
            *plain, mesh=mesh, cu_seqlens=DOCUMENTS
        ),
        'ring_attention, "auto"': lambda: ring_attention(*plain, mesh=mesh, strategy="auto"),
        'ring_attention, "auto", 3 documents': lambda: ring_attention(
            *plain, mesh=mesh, strategy="auto", cu_seqlens=DOCUMENTS
        ),
        "ring_attention on DTensors": lambda: ring_attention(*dtensors).to_local(),
        'ring_attention on DTensors, "auto"': lambda: ring_attention(
            *dtensors, strategy="auto"
        ).to_local(),
        "scaled_dot_product_attention on DTensors": lambda: F.scaled_dot_product_attention(
            *dtensors, is_causal=True
        ).to_local(),
    }


class Silent(NullTransport):
    """Messages that take no time, of zeros: what memory held before may be no number."""

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        for message in receives:
            message.flat.zero_()
        return ()


def measure_two(seconds: float) -> list[Cost]:
    """Costs of rank 1 of two ranks, by layout and kernel; there is no rank 0, nothing is sent."""
    costs = []
    for layout in ("zigzag", "contiguous"):
        with alone(2) as mesh:
            SequenceAxis(mesh, layout)
            set_transport(mesh.get_group(), Silent())
            plain = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
            for kernel in (None, "instant"):
                call = partial(ring_attention, *plain, mesh=mesh, kernel=kernel)
                name = f"ring_attention, two ranks, {layout}" + (", no kernel" if kernel else "")
                merged: Any = (lambda _: None) if kernel else merge._by_ranges
                with patch.object(merge, "_by_ranges", merged):
                    costs.append(measure(name, call, seconds))
    return costs


def measure(name: str, call: Call, seconds: float) -> Cost:
    """Medians, of calls that autograd records."""
    grad = torch.ones(SHAPE)

    def both() -> None:
        call().backward(grad)

    stages = ("call()", {"call": call}), ("both()", {"both": both})
    times = [
        Timer(code, globals=names).blocked_autorange(min_run_time=seconds) for code, names in stages
    ]
    return Cost(name, *(1e6 * time.median for time in times))


def agreement(num_calls: int) -> float:
    """Microseconds of the host that a call adds whose record it does not wait for, a median."""
    store, limit = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as threads:
        groups = threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2))
    one, other = (LateRecords(group, (0, 1), refuse) for group in groups)
    state, record = GroupState((0, 1), sends_records=True), CallRecord({"scale": "0.5"})
    site, times = CallSite("train.py:12 in step", "layers.0", "R, S(2)"), []
    for number in range(1, num_calls + 1):
        begin = time.perf_counter()
        state.check()
        one.post(PostedCall(record, number, 0, site, "forward", time.monotonic()))
        state.check()
        times.append(time.perf_counter() - begin)
        other.post(PostedCall(record, number, 0, site, "forward", time.monotonic()))
        time.sleep(0.001)  # the kernels of a layer
    if not one.confirm(60):
        raise RuntimeError("the calls were not confirmed")
    for rank in (one, other):
        rank.close()
    return 1e6 * statistics.median(times)


def refuse(failed: Failed) -> None:
    raise RuntimeError(failed.text)


def report(console: Console, costs: list[Cost], agreed: float) -> None:
    """Print what was measured, in Markdown."""
    console.print(f"\nMicroseconds, medians; one rank or two, float32, (B, N, L, H) = {SHAPE}.\n")
    numbers = ("forward", "on top of the kernel", "with backward", "on top of the kernel")
    table = table_of(("call",), numbers)
    kernel = costs[0]
    for cost in costs:
        columns = cost.forward, cost.forward - kernel.forward, cost.both, cost.both - kernel.both
        table.add_row(cost.name, *(f"{x:.0f}" for x in columns))
    console.print(table)
    console.print(
        f"\nAgreement adds {agreed:.1f} us to a call where the host does not wait for it.\n"
    )


def main() -> None:
    quick = is_quick(__doc__, "take seconds")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    SequenceAxis(mesh, "zigzag")
    about = origin()
    register_kernel(Instant())
    costs = [measure(name, call, 0.2 if quick else 4) for name, call in calls(mesh).items()]
    dist.destroy_process_group()
    costs += measure_two(0.2 if quick else 4)
    agreed = agreement(300 if quick else 3000)
    measured = {"costs": [asdict(cost) for cost in costs], "agreement": agreed}
    show = partial(report, costs=costs, agreed=agreed)
    publish("calls", "Calls on CPUs", quick, about, measured, show)


if __name__ == "__main__":
    main()
