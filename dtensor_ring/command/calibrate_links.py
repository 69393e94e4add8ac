"""Measures what moves bytes between ranks: messages, collectives, and kernels beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring.command.calibrate_kernels import CalibratedProblem, full_tile
from dtensor_ring.command.stopwatch import Call, Points, Stopwatch
from dtensor_ring.compute.kernels import Kernel
from dtensor_ring.simulate.machine import Curve
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, Work

# Bytes of a message, or of all messages of a rank.
BYTES = (2**10, *(4**n for n in range(7, 15)))

# Starts the messages of a hop.
Start = Callable[[], Sequence[Work]]

# The largest slowdown of a transfer; a kernel that stops it makes the quotient infinite.
MOST = 100.0


class TimedMessages:
    """The messages of one rank within a group whose ranks all send at the same time.

    Args:
        group: the ranks.
        device: where tensors are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank, self.size = group.rank(), group.size()
        self._transport = ProcessGroupTransport(group)
        self._transport.prepare(device)

    def tensor(self, num_bytes: int) -> Tensor:
        """Return a flat tensor; its memory was written to, so that no page is new."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def shift(self, num_bytes: int) -> Start:
        """Return a call that starts a message to the next rank, and one from the previous."""
        sent, received = self.tensor(num_bytes), self.tensor(num_bytes)
        to, source = (self._rank + 1) % self.size, (self._rank - 1) % self.size
        return partial(self._transport.start, [P2P(received, source)], [P2P(sent, to)])

    def all_to_all(self, num_bytes: int) -> Start:
        """Return a call that starts one message to each other rank, as Ulysses does.

        Args:
            num_bytes: bytes that a rank sends, to all others together.
        """
        others = [rank for rank in range(self.size) if rank != self._rank]
        each = max(1, num_bytes // len(others))
        sends, receives = ([P2P(self.tensor(each), x) for x in others] for _ in range(2))
        return partial(self._transport.start, receives, sends)

    def all_gather(self, num_bytes: int) -> Call:
        """Return the collective in which each rank sends its shard to all others."""
        whole, shard = self._whole_and_shard(num_bytes)
        return partial(dist.all_gather_into_tensor, whole, shard, group=self._group)

    def reduce_scatter(self, num_bytes: int) -> Call:
        """Return the collective in which each rank gets the sum of its shard."""
        whole, shard = self._whole_and_shard(num_bytes)
        return partial(dist.reduce_scatter_tensor, shard, whole, group=self._group)

    def _whole_and_shard(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        numel = max(1, num_bytes // (self.size - 1) // 4)
        shapes = self.size * numel, numel
        whole, shard = (torch.zeros(numel, device=self._device) for numel in shapes)
        return whole, shard


def link_points(messages: TimedMessages) -> dict[str, Points]:
    """Return messages and collectives by the bytes that a rank sends, for `Stopwatch.measure`.

    Args:
        messages: those of this rank; all ranks of the group send at once.
    """

    def sized(make: Callable[[int], Call]) -> Points:
        for num_bytes in BYTES:
            yield float(num_bytes), make(num_bytes)

    return {
        "p2p": sized(lambda size: waited(messages.shift(size))),
        "all_to_all": sized(lambda size: waited(messages.all_to_all(size))),
        "all_gather": sized(messages.all_gather),
        "reduce_scatter": sized(messages.reduce_scatter),
    }


def waited(start: Start) -> Call:
    """Return a call that starts messages and waits for them."""
    return lambda: wait(start())


def wait(works: Sequence[Work]) -> None:
    """Wait for messages."""
    for work in works:
        work.wait()


def hop_seconds(watch: Stopwatch, messages: TimedMessages) -> float:
    """Return the time of the host to start the messages of a hop."""
    return watch.host_seconds(messages.shift(1), wait)


# The longest transfer that kernels run beside, in seconds.
BESIDE_SECONDS = 0.1

# Rows of the tiles of these kernels, on a CPU and on a GPU.
BESIDE_ROWS = 512, 4096


class Beside(NamedTuple):
    """Times of kernels and of a transfer, in seconds.

    Attributes:
        kernels: of the kernels alone.
        transfer: of the transfer alone.
        together: until the kernels end that begin with the transfer.
        whole: until the transfer ends, too.

    >>> Beside(kernels=2.0, transfer=4.0, together=3.0, whole=5.5).slowdowns
    (2.0, 1.5)
    """

    kernels: float
    transfer: float
    together: float
    whole: float

    @property
    def slowdowns(self) -> tuple[float, float]:
        """How many times longer the transfer takes beside the kernels, and they beside it.

        The transfer outlasts the kernels, and has its usual speed after them. So while they run it
        does what it does alone in the rest of its time.
        """
        moved = self.transfer - (self.whole - self.together)
        transfer = self.together / max(moved, self.together / MOST)
        return max(1.0, transfer), max(1.0, self.together / self.kernels)


def measure_beside(
    watch: Stopwatch,
    messages: TimedMessages,
    p2p: Curve,
    problem: CalibratedProblem,
    kernel: Kernel,
) -> tuple[float, float, list[Beside]]:
    """Time kernels beside a transfer that takes twice as long, and both alone, in turns.

    Returns:
        `beside_kernel` and `beside_transfer` of `Machine`, and what was measured.
    """
    # The largest message that is not too long; at least one of the first two is.
    size = max([x for x in BYTES if p2p(x) <= BESIDE_SECONDS], default=BYTES[1])
    tile = full_tile(problem, kernel, BESIDE_ROWS[watch.on_gpu], watch.device)
    start, works = messages.shift(size), list[Work]()
    count = max(1, round(p2p(size) / 2 / watch.seconds(tile.forward)))

    def kernels() -> None:
        for _ in range(count):
            tile.forward()

    def begin_both() -> None:
        works[:] = start()
        kernels()

    def end() -> None:
        wait(works)

    times = [
        Beside(*watch.laps(kernels), *watch.laps(waited(start)), *watch.laps(begin_both, end))
        for _ in range(2 * watch.effort.repeats)
    ]
    transfer, kernel_beside = (median(x) for x in zip(*(x.slowdowns for x in times), strict=True))
    return transfer, kernel_beside, times
