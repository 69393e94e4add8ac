"""Measure what decoding over an axis adds to the kernel, beside bare messages and other merges.

Run ``python benchmarks/decode.py``: it starts its processes itself, prints tables, and writes them
with every single time to ``benchmarks/results``. With ``--quick`` it takes less than a minute and
writes to ``out`` instead. Everything compared is timed in turns, some calls in a row; ratios are
medians of the ratios of neighbouring times. Leave the machine alone meanwhile.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from harness import is_quick, origin, publish, spawn, table_of
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import Mask, decode_attention

HEADS, KEY_HEADS, HEAD_DIM = 4, 1, 64
ROW_BYTES = 4 * (HEAD_DIM + 1)
"""An output and its log-sum-exp, float32."""
NUM_KEYS = 32
"""Of a rank: few, so that the kernel takes little of the time."""
IN_A_ROW = 10
"""Calls that are timed together, as a model's layers are called."""
STARTS = 6
"""Times that the processes are started: how threads share cores lasts as long as the processes."""
LONG = 16384, 65536
"""Numbers of keys between which the kernel's time for a key is measured."""
LAYER = 32, 8, 128
"""Heads of queries and of keys, and head dim, of a layer of Llama 3 8B."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """How many ranks, and how many sequences each of which is a row of some bytes."""

    world_size: int
    batch: int
    repeats: int

    @property
    def kilobytes(self) -> float:
        """Size of a rank's partial result."""
        return self.batch * HEADS * ROW_BYTES / 1024


@dataclass
class Measurement:
    """Seconds of one call, by contender and repeat; and of the kernel for one key of `LAYER`."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    per_key: float = 0.0

    def add(self, seconds: dict[str, list[float]], per_key: float) -> None:
        """Put the times of one more start of the processes to those known."""
        for name, times in seconds.items():
            self.seconds[name] = self.seconds.get(name, []) + times
        self.per_key = min(self.per_key or per_key, per_key)

    def microseconds(self, name: str) -> float:
        return 1e6 * median(self.of(name))

    def of(self, name: str) -> list[float]:
        """What a contender takes without the attention on one rank, of the same round."""
        whole, part = {"added": ("ours", "alone"), "host": ("alone", "kernel")}.get(
            name, (name, "alone")
        )
        pairs = zip(self.seconds[whole], self.seconds[part], strict=True)
        return [seconds - without for seconds, without in pairs]

    def ratio(self, name: str, other: str) -> float:
        return median(x / y for x, y in zip(self.of(name), self.of(other), strict=True))

    @property
    def break_even(self) -> float:
        """Keys from which the axis is faster than one rank with all of them."""
        world_size = self.case.world_size
        saved = self.per_key * (1 - 1 / world_size)
        return median(self.of("added")) / saved


def cases(quick: bool) -> list[Case]:
    """From 1 KB to 256 KB; the largest that goes with the record of a call is the fourth."""
    batches = (1, 62) if quick else (1, 4, 16, 62, 252)
    sizes = (2,) if quick else (2, 4)
    return [Case(size, batch, 5 if quick else 10) for size in sizes for batch in batches]


def gathered(part: Tensor) -> Call:
    """A bare all-gather of the same bytes."""
    whole = part.new_empty(dist.get_world_size() * part.numel())
    return lambda: dist.all_gather_into_tensor(whole, part.view(-1))


def gathered_and_reduced(out: Tensor, lse: Tensor) -> Call:
    """An all-gather of the log-sum-exp, then an all-reduce of the outputs, scaled."""
    lses = lse.new_empty(dist.get_world_size(), *lse.shape)

    def merge() -> Tensor:
        dist.all_gather_into_tensor(lses.view(-1), lse.view(-1))
        total = lses.logsumexp(0)
        scaled = out * (lse - total).exp().unsqueeze(-1)
        dist.all_reduce(scaled)
        return scaled

    return merge


def three_reductions(out: Tensor, lse: Tensor) -> Call:
    """All-reduces of the largest log-sum-exp, of the denominators and of the numerators."""

    def merge() -> Tensor:
        largest = lse.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        below = (lse - largest).exp()
        above = out * below.unsqueeze(-1)
        dist.all_reduce(below)
        dist.all_reduce(above)
        return above / below.unsqueeze(-1)

    return merge


def kernel(query: Tensor, key: Tensor, value: Tensor) -> Call:
    """PyTorch's kernel, with the heads of a group as rows of one head."""
    folded = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return lambda: attend(folded, key, value)


def in_turn(attend: Call, merge: Call) -> Call:
    """The attention of one rank, then a merge: messages after work take longer than those in a
    row, because cores have gone to sleep meanwhile."""

    def both() -> None:
        attend()
        merge()

    return both


def time_in_turns(contenders: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Seconds of one call, by contender and repeat: of this rank, after all ranks have met."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(-3, repeats):
        for name, call in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                call()
            if repeat >= 0:
                seconds[name].append((time.perf_counter() - start) / IN_A_ROW)
    return seconds


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    torch.manual_seed(0)
    size, rank = mesh.size(), mesh.get_local_rank()
    query = torch.randn(case.batch, HEADS, 1, HEAD_DIM)
    whole = torch.randn(2, case.batch, KEY_HEADS, size * NUM_KEYS, HEAD_DIM)
    key, value = (x.contiguous() for x in whole.chunk(size, 3)[rank])
    options = {"mask": Mask.full(), "return_lse": True}
    out, lse = decode_attention(query, key, value, **options)
    ours = partial(decode_attention, query, key, value, mesh=mesh, **options)
    merges = {
        "bare": gathered(torch.cat([out, lse.unsqueeze(-1)], -1)),
        "gather + reduce": gathered_and_reduced(out, lse),
        "3 reduces": three_reductions(out, lse),
    }
    # All of them must do the same work.
    for name in ("gather + reduce", "3 reduces"):
        torch.testing.assert_close(merges[name](), ours()[0], atol=1e-4, rtol=1e-4)
    alone = partial(decode_attention, query, key, value, **options)
    contenders = {
        "ours": ours,
        "alone": alone,
        "kernel": kernel(query, key, value),
        **{name: in_turn(alone, merge) for name, merge in merges.items()},
    }
    return Measurement(case, time_in_turns(contenders, case.repeats), seconds_per_key())


def seconds_per_key() -> float:
    """Of the kernel, for one query and one more key of `LAYER`."""
    heads, key_heads, head_dim = LAYER
    query, times = torch.randn(1, heads, 1, head_dim), []
    for num_keys in LONG:
        key, value = torch.randn(2, 1, key_heads, num_keys, head_dim)
        call = kernel(query, key, value)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        times.append(median(seconds))
    return (times[1] - times[0]) / (LONG[1] - LONG[0])


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        f"\nOne token of {HEADS} heads of {HEAD_DIM} for each sequence, {NUM_KEYS} keys a rank, "
        "gloo, one thread a rank, each\nrank on a core of its own if there are as many, "
        f"{STARTS} starts of the processes. "
        "Microseconds of a call, medians; ratios are medians of the ratios of\nneighbouring times. "
        "Each follows the same attention on one rank, whose time is\ntaken off: `added` is our "
        "call, `bare` one all-gather of the same bytes. `host` is our call on one rank\n"
        "without the kernel.\n"
        f"`break-even` is the number of float32 keys of a layer of {LAYER[0]} and {LAYER[1]} heads "
        f"of {LAYER[2]}\nfrom which the ranks are faster than one of them with all keys.\n"
    )
    names = ["added", "bare", "gather + reduce", "3 reduces", "host"]
    ratios = [("added", "bare"), ("gather + reduce", "added"), ("3 reduces", "added")]
    numbers = [*names, *(f"{a} / {b}" for a, b in ratios), "break-even"]
    table = table_of(("ranks", "KB"), numbers)
    for m in measurements:
        times = [f"{m.microseconds(name):.0f}" for name in names]
        shown = [f"{m.ratio(*pair):.2f}" for pair in ratios]
        row = [str(m.case.world_size), f"{m.case.kilobytes:.0f}", *times, *shown]
        table.add_row(*row, f"{m.break_even:,.0f}")
    console.print(table)


def main() -> None:
    quick = is_quick(__doc__)
    about, todo = origin(), cases(quick)
    measurements = [Measurement(case) for case in todo]
    for world_size in sorted({case.world_size for case in todo}):
        now = [m for m in measurements if m.case.world_size == world_size]
        for _ in range(1 if quick else STARTS):
            found = spawn(world_size, measure, [m.case for m in now], bind=True)
            for m, of_start in zip(now, found, strict=True):
                m.add(of_start["seconds"], of_start["per_key"])
    measured = {"measurements": [asdict(m) for m in measurements]}
    show = partial(report, measurements=measurements)
    publish("decode", "Decoding over ranks on CPUs", quick, about, measured, show)


if __name__ == "__main__":
    main()
