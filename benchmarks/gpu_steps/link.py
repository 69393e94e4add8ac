"""Links to ranks that are not there: what arrives is a copy, at once or as slow as over a link."""

from collections.abc import Sequence
from functools import cache
from itertools import cycle
from math import inf

import torch
from torch import Tensor

from dtensor_ring.transport.transport import P2P, Transport


class Arrival:
    """A message on its way, on another stream than what is computed."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        """Lets the current stream wait; the host does not."""
        torch.cuda.current_stream().wait_event(self._event)


class Link(Transport):
    """The transport of a rank that runs alone; sends cost nothing.

    Args:
        shards: the messages with keys and values, in the order in which they arrive; after the last
            comes the first again.
        sums: the beginning of every message with sums of gradients; of another dtype.
        rate: bytes per second of the link, `None` for as fast as the device copies; infinite if all
            is there already, and has any content.
    """

    def __init__(self, shards: list[Tensor], sums: Tensor, rate: float | None = None) -> None:
        self._shards, self._sums, self._rate = cycle(shards), sums, rate
        self._stream = torch.cuda.Stream()

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Arrival]:
        if self._rate == inf:
            return []
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for flat in (message.flat for message in receives):
                if self._rate is not None:
                    seconds = flat.numel() * flat.itemsize / self._rate
                    torch.cuda._sleep(int(seconds * cycles_per_second()))
                is_sum = flat.dtype == self._sums.dtype
                flat.copy_(self._sums[: flat.numel()] if is_sum else next(self._shards))
        return [Arrival(self._stream)] if receives else []


@cache
def cycles_per_second() -> float:
    """Rate of the clock that `torch.cuda._sleep` counts, when nothing else runs.

    Under attention it may be slower, and a link with it: what is exposed is rather overstated.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 200_000_000
    for event in (start, end):
        event.record()
        torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return cycles / (1e-3 * start.elapsed_time(end))
