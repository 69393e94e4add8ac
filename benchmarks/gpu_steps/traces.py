"""What the GPU did and when, from a trace: which kernels, and what of a message they cover."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "messages": ("nccl",),
    "merges": ("_accumulate_sums",),
    "attention": ("flash", "fmha", "sdpa", "cudnn", "attention", "attn"),
    "copies and sums": ("memcpy", "memset", "copy", "elementwise", "catarray", "fill", "reduce"),
}
"""Parts of kernels' names, by what the kernel is for; the first that fits counts."""
OTHER = "other kernels"


class KernelSpan(NamedTuple):
    """A kernel or a copy on a GPU, from `start` to `end` in seconds."""

    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """What it is for: a key of `KINDS`, or `OTHER`."""
        name = self.name.lower()
        fits = (kind for kind, parts in KINDS.items() if any(part in name for part in parts))
        return next(fits, OTHER)


def spans_of(run: Callable[[], object]) -> list[KernelSpan]:
    """Kernels and copies of what runs, by their start."""
    for what in (
        torch.cuda.synchronize,
        run,
    ):  # to start the tracer takes long
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            what()
            torch.cuda.synchronize()
    found = [
        KernelSpan(x.name, 1e-6 * x.time_range.start, 1e-6 * x.time_range.end)
        for x in trace.events() or ()
        # An annotation of the host has a copy of its span among those of the device.
        if x.device_type == DeviceType.CUDA and not getattr(x, "is_user_annotation", False)
    ]
    return sorted(found, key=lambda span: span.start)


def joined(spans: Iterable[KernelSpan]) -> list[tuple[float, float]]:
    """Stretches of time that the spans cover, in order and apart."""
    stretches: list[tuple[float, float]] = []
    for _, start, end in sorted(spans, key=lambda span: span.start):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = stretches[-1][0], max(end, stretches[-1][1])
        else:
            stretches.append((start, end))
    return stretches


def exposed(span: KernelSpan, covers: Sequence[tuple[float, float]]) -> float:
    """Seconds of the span in which none of the stretches lies."""
    hidden = (min(span.end, end) - max(span.start, start) for start, end in covers)
    return span.end - span.start - sum(max(0.0, part) for part in hidden)


def seconds_by_kind(spans: Sequence[KernelSpan]) -> dict[str, float]:
    """Seconds of each kind of kernel, and `"idle"`, between the first start and the last end."""
    total: Counter[str] = Counter()
    for span in spans:
        total[span.kind] += span.end - span.start
    if spans:
        busy = joined(spans)
        total["idle"] = busy[-1][1] - busy[0][0] - sum(end - start for start, end in busy)
    return dict(total.most_common())
