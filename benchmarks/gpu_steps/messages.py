"""Messages of a rank to itself, by the transport that hops use, and beside attention."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from dtensor_ring import Contiguous, Mask
from dtensor_ring.compute.kernels import KERNELS, Launch
from dtensor_ring.compute.memory import WHOLE
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, Transport
from gpu_steps.alone import Attention, best_kernels, median_seconds, scores_of
from gpu_steps.graphs import captured, no_waiting
from gpu_steps.machine import Finding, Machine

EXPOSED = 0.1
"""Of messages beside a tile, at most: an aim."""
FILLED = 0.4
"""Of a tile's time, which messages beside it take alone."""


def messages(machine: Machine) -> Iterator[Finding]:
    with machine.connected() as mesh:
        transport = ProcessGroupTransport(mesh.get_group())
        transport.prepare(torch.device(machine.device))
        sent, received = _shard(machine)
        hop = partial(_hop, transport, sent, received)
        yield _arrives("message to itself", hop, sent, received)
        yield _arrives("message to itself, without waiting", hop, sent, received, no_waiting)
        yield _replayed(hop, sent, received)
        seconds = median_seconds(hop, machine.repeats)
        yield Finding("message to itself, GB/s", f"{sent.nbytes / seconds / 1e9:.0f}")
        for kernel in best_kernels(machine.device):
            yield _beside(machine, kernel, hop, seconds)


def _replayed(hop: Callable[[], object], sent: Tensor, received: Tensor) -> Finding:
    """Whether a message in a CUDA graph arrives.

    The graph ends here, before its group does: NCCL waits for all graphs that have its calls.
    """
    graph, _ = captured(hop)
    return _arrives("message to itself, in a CUDA graph", graph.replay, sent, received)


def _shard(machine: Machine) -> tuple[Tensor, Tensor]:
    """As large as the keys and values of 8 heads of 128."""
    sent = torch.randn(2 * 8 * 128 * machine.side, device=machine.device).to(machine.dtype)
    return sent, torch.empty_like(sent)


def _hop(transport: Transport, sent: Tensor, received: Tensor) -> None:
    for work in transport.start([P2P(received, 0)], [P2P(sent, 0)]):
        work.wait()


def _arrives(
    what: str,
    hop: Callable[[], object],
    sent: Tensor,
    received: Tensor,
    mode: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Finding:
    received.zero_()
    with mode():
        hop()
    is_right = torch.equal(sent, received)
    return Finding(what, "arrived" if is_right else "is not what was sent", is_wrong=not is_right)


def _beside(machine: Machine, kernel: str, hop: Callable[[], object], alone: float) -> Finding:
    """How much longer a tile takes with messages in flight, as a part of the messages.

    The kernel is told of it or not: flash attention 3 leaves multiprocessors to it if it knows.
    """
    attention = Attention(kernel, 1, machine.side, Contiguous(), Mask.full(), device=machine.device)
    _, query, key, value = attention.inputs()
    scores, stream = scores_of(attention), torch.cuda.Stream()

    def tile(num_messages: int, in_flight: bool) -> None:
        launch = Launch(WHOLE, WHOLE, attention.mask, in_flight=in_flight)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(num_messages):
                hop()
        KERNELS[kernel].forward(query, key, value, launch, scores)
        torch.cuda.current_stream().wait_stream(stream)

    free = median_seconds(partial(tile, 0, False), machine.repeats)
    # A message to itself is a copy of some microseconds: one alone would be lost in the noise.
    count = max(1, round(FILLED * free / alone))
    untold, told = (
        median_seconds(partial(tile, count, is_told), machine.repeats) for is_told in (False, True)
    )
    parts = [(loaded - free) / (count * alone) for loaded in (untold, told)]
    aim = f"at most {EXPOSED:.0%} exposed" if parts[1] > EXPOSED else ""
    what = f"tile of {kernel} beside messages of {1e3 * count * alone:.2f} ms"
    found = f"{1e3 * free:.2f} ms alone, {1e3 * told:.2f} ms with it; exposed is {parts[1]:.0%}"
    return Finding(what, f"{found}, {parts[0]:.0%} if the kernel does not know", aim)
