"""Times calls that all ranks make at the same time, on CPUs and GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from math import ceil
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtensor_ring.lab.machine import Curve
from dtensor_ring.lab.report import Track, untracked

Call = Callable[[], object]

# Sizes and their calls.
Points = Iterable[tuple[float, Call]]


class Effort(NamedTuple):
    """How long to measure.

    Attributes:
        repeats: number of times that each call is timed.
        shortest: seconds of one time; shorter calls are repeated within it.
        longest: seconds of a call after which no larger size is tried.
    """

    repeats: int
    shortest: float
    longest: float


FULL_EFFORT = Effort(repeats=5, shortest=0.01, longest=0.06)
QUICK_EFFORT = Effort(repeats=2, shortest=0.0, longest=0.005)

# Bytes that a CPU passes over before a call whose tensors caches would not have, and the largest
# number of such calls within one time.
PASSED, MAX_COLD = 2**26, 8

# Cycles that a GPU sleeps for each call that the host queues meanwhile: about 50 us.
CYCLES = 100_000


@dataclass(frozen=True)
class Series:
    """Measured seconds by size.

    Attributes:
        sizes: ascending, such as bytes or FLOPs.
        seconds: by size and repeat, that of the slowest rank.

    >>> Series((1.0, 2.0, 4.0), ((3.0,), (2.0, 9.0, 1.0), (5.0,))).curve(1.0)
    Curve(sizes=(2.0, 4.0), seconds=(1.0, 4.0))
    """

    sizes: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def curve(self, host: float = 0.0) -> Curve:
        """Return the median of each size without the seconds that the host takes.

        Noise only adds time. So a size that takes as long as a larger one, or longer, is left out;
        if only one is left, time is proportional to size.
        """
        found = [max(median(x) - host, 0.0) for x in self.seconds]
        pairs = list(zip(self.sizes, found, strict=True))
        kept = [x for at, x in enumerate(pairs) if all(x[1] < y[1] for y in pairs[at + 1 :])]
        line = kept if len(kept) > 1 else [(0.0, 0.0), *kept]
        return Curve(tuple(size for size, _ in line), tuple(seconds for _, seconds in line))


# Returns the seconds of a call that is repeated.
Timer = Callable[[Call, int], float]


class Stopwatch:
    """Times calls on all ranks of the default process group; each time is the slowest rank's.

    All ranks time the same calls in the same order.

    Args:
        device: where the calls run.
        effort: how long to measure.
        track: goes through what is measured, and may show how much is done.

    Attributes:
        on_gpu: whether that is a GPU.
    """

    def __init__(
        self,
        device: torch.device,
        effort: Effort = FULL_EFFORT,
        track: Track[Any] = untracked,
    ) -> None:
        self.device, self.effort, self._track = device, effort, track
        self.on_gpu = device.type == "cuda"

    def measure(
        self, points: Mapping[str, Points], cold: Collection[str] = ()
    ) -> dict[str, Series]:
        """Time calls of several kinds by size, each kind until a call takes too long.

        All calls are timed in turns: what disturbs the machine for some seconds disturbs each of
        them once, and the median does not see it.

        Args:
            points: for each kind, ascending sizes and calls, which are made when their turn comes.
            cold: kinds whose calls come after kernels in an attention. On a CPU they find little
                of their tensors in caches then, and here, too.
        """
        is_cold = {kind: kind in cold and not self.on_gpu for kind in points}
        timers = {x: self._timed_cold if is_cold[x] else self._timed for x in points}
        known = {
            kind: list(self._grown(of, timers[kind]))
            for kind, of in self._track(list(points.items()), "first calls")
        }
        calls = [
            partial(timers[kind], call, count)
            for kind, of in known.items()
            for _, call, count in of
        ]
        turns = self._track(range(self.effort.repeats), "repeats")
        rounds = [self._slowest([timed() for timed in calls]) for _ in turns]
        seconds = iter(zip(*rounds, strict=True))
        return {
            kind: Series(tuple(size for size, _, _ in of), tuple(islice(seconds, len(of))))
            for kind, of in known.items()
        }

    def _grown(self, points: Points, timed: Timer) -> Iterator[tuple[float, Call, int]]:
        """Yield sizes and calls, and how often a call is repeated within one time."""
        for size, call in points:
            first = min(self._slowest([timed(call, 1) for _ in range(2)]))
            yield size, call, max(1, ceil(self.effort.shortest / max(first, 1e-6)))
            if first > self.effort.longest:
                return

    def seconds(self, call: Call) -> float:
        """Return the median time of a call on the device."""
        return median(self.measure({"": [(0.0, call)]})[""].seconds[0])

    def host_seconds(self, call: Call, finish: Callable[[Any], object] | None = None) -> float:
        """Return the median time of the host for a call, which does not wait for the device.

        Args:
            call: what is timed.
            finish: gets what the call returned, and is not timed.
        """
        found = []
        for repeat in range(-3, 10 * self.effort.repeats):
            begin = time.perf_counter()
            result = call()
            spent = time.perf_counter() - begin
            if finish is not None:
                finish(result)
            found += [spent] * (repeat >= 0)
        self.synchronize()
        return self._slowest([median(found)])[0]

    def laps(self, *calls: Call) -> list[float]:
        """Return when each call has ended on the device, in seconds from the first one's begin.

        The calls follow one another on the current stream. Each time is the slowest rank's.
        """
        self._barrier()
        marks = [self._mark()]
        for call in calls:
            call()
            marks.append(self._mark())
        self.synchronize()
        return self._slowest([self._between(marks[0], mark) for mark in marks[1:]])

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @cached_property
    def _passed(self) -> torch.Tensor:
        return torch.zeros(PASSED // 4)

    def _timed_cold(self, call: Call, count: int) -> float:
        """Return the seconds of one of up to `count` calls, each after a pass over other memory."""
        call()
        count, found = min(count, MAX_COLD), 0.0
        for _ in range(count):
            self._passed.add_(1)
            self._barrier()
            begin = self._mark()
            call()
            found += self._between(begin, self._mark())
        return found / count

    def _timed(self, call: Call, count: int) -> float:
        """Return the seconds of one of `count` calls, after one that is not timed."""
        # Calls of other kinds ran before this one.
        call()
        self._barrier()
        if self.on_gpu:
            # The host queues all calls while the GPU sleeps, so that only the GPU's time counts.
            torch.cuda._sleep(CYCLES * count)
        begin = self._mark()
        for _ in range(count):
            call()
        end = self._mark()
        self.synchronize()
        return self._between(begin, end) / count

    def _mark(self) -> Any:
        """Return this moment: an event of the current stream, or the time of the host."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Return the largest of each time over all ranks."""
        found = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def _barrier(self) -> None:
        self.synchronize()
        dist.all_reduce(torch.zeros(1))
