"""Measure what it takes to exchange tokens for heads, next to a bare all-to-all of the same bytes.

Run ``python benchmarks/exchange.py``: it starts 2, 4 and 8 processes itself, prints a table, and
writes it with every single time to ``benchmarks/results``. As root, it measures the exchange
between as many hosts on links of two rates, too; hosts are network namespaces of this machine (see
network.py). With ``--quick`` it repeats less, with fewer tokens on two ranks, and writes to ``out``
instead. Both are timed in turns, and ratios are medians of the ratios of neighbouring times. Leave
the machine alone meanwhile.
"""

import os
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from baselines import Stages, median_ratio, time_paired
from harness import (
    HEAD_DIM,
    NUM_HEADS,
    is_quick,
    origin,
    publish,
    random_shards,
    spawn,
    spawn_on_hosts,
    table_of,
    work_on_host,
)
from network import hosts
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import SequenceAxis, exchange

SEQ_LEN = 16384
LAYOUTS = "contiguous", "zigzag"
RATES = 400, 50
"""Of a host's link, in MB/s."""
WAYS = "to heads", "there and back"
NUM_TENSORS = 3
"""Query, key and value: as many heads each."""


@dataclass(frozen=True)
class Case:
    """What is measured."""

    world_size: int
    seq_len: int
    layout: str
    repeats: int
    rate: int | None = None
    """One of `RATES` between hosts; `None` on one machine."""

    @property
    def num_bytes(self) -> int:
        """Of the tensors of a rank, of which all but its own part leaves."""
        return NUM_TENSORS * self.seq_len // self.world_size * NUM_HEADS * HEAD_DIM * 4


@dataclass(frozen=True)
class Measurement:
    """Seconds by contender, stage and repeat."""

    case: Case
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)


def exchange_stages(shards: list[Tensor], mesh: DeviceMesh) -> Stages:
    """Ours: there with query, key and value, and back with their gradients."""
    exchanged: list[Tensor] = []

    def there() -> list[Tensor]:
        exchanged[:] = exchange(shards, mesh)
        return exchanged

    return there, lambda: exchange(exchanged, mesh, to="tokens")


def bare_stages(shards: list[Tensor], group: dist.ProcessGroup) -> Stages:
    """As many bytes between the same ranks, out of one tensor and into a new one, twice."""
    sent = torch.cat([x.flatten() for x in shards])

    def there() -> list[Tensor]:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return [received]

    return there, there


def cases(quick: bool, rates: tuple[int | None, ...]) -> list[Case]:
    """By ranks, rate and layout."""
    seq_len, repeats = (SEQ_LEN // 8, 3) if quick else (SEQ_LEN, 25)
    return [
        Case(world_size, seq_len, layout, repeats, rate)
        for world_size in ((2,) if quick else (2, 4, 8))
        for rate in rates
        for layout in LAYOUTS
    ]


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    group = mesh.get_group()
    # An axis has one layout for good, so each case has processes of its own.
    SequenceAxis(mesh, case.layout)
    shards = random_shards(group.rank(), case.seq_len // case.world_size)[:NUM_TENSORS]
    contenders = {"ours": exchange_stages(shards, mesh), "bare": bare_stages(shards, group)}
    ours = contenders["ours"]
    ours[0]()
    for found, given in zip(ours[1](), shards, strict=True):
        torch.testing.assert_close(found, given, rtol=0, atol=0)
    return Measurement(case, time_paired(contenders, case.repeats, lambda: dist.barrier(group)))


def measured_here(case: Case) -> list[dict[str, Any]]:
    """By processes of one machine."""
    return spawn(case.world_size, measure, [case])


def measured_on_hosts(case: Case) -> list[dict[str, Any]]:
    """By a process on each host."""
    assert case.rate is not None
    with hosts(case.world_size) as network:
        network.limit(1e6 * case.rate)
        return spawn_on_hosts(network, __file__, [case])


def table(measurements: list[Measurement]) -> Table:
    """Two rows for each case."""
    numbers = ("MiB of a rank", "ours, ms", "bare, ms", "ours/bare")
    result = table_of(("ranks", "MB/s", "layout", "what"), numbers)
    for m in measurements:
        for stage, what in enumerate(WAYS):
            ours, bare = m.seconds["ours"][stage], m.seconds["bare"][stage]
            result.add_row(
                *(str(m.case.world_size), str(m.case.rate or ""), m.case.layout, what),
                f"{(stage + 1) * m.case.num_bytes / 2**20:.1f}",
                *(f"{1e3 * median(x):.1f}" for x in (ours, bare)),
                f"{median_ratio(ours, bare):.3f}",
            )
    return result


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        f"\n{measurements[0].case.seq_len:,} tokens, batch 1, {NUM_TENSORS} tensors of {NUM_HEADS} "
        f"heads of {HEAD_DIM}, float32, gloo, one thread a\nrank. Ours: `exchange`, which packs "
        "messages and unpacks them to where heads and tokens belong; bare:\n`all_to_all_single` of "
        "one tensor of as many bytes into a new one, which lie as they travel. The time of the\n"
        "slowest rank. MB/s is the rate of a host's link; without it, ranks are processes of one "
        "machine.\n"
    )
    console.print(table(measurements))


def main() -> None:
    quick = is_quick(__doc__)
    about = origin()
    found = [x for case in cases(quick, (None,)) for x in measured_here(case)]
    if os.geteuid() == 0:
        rates = RATES[:1] if quick else RATES
        found += [x for case in cases(quick, rates) for x in measured_on_hosts(case)]
    measurements = [Measurement(Case(**x["case"]), x["seconds"]) for x in found]
    measured = {"measurements": [asdict(m) for m in measurements]}
    show = partial(report, measurements=measurements)
    publish("exchange", "Tokens for heads, or a bare all-to-all", quick, about, measured, show)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1].isdigit():  # started by `Hosts.run`
        work_on_host(measure, Case, *sys.argv[1:])
    else:
        main()
