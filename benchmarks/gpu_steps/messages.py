"""Messages of a rank to itself, by the transport that hops use, and beside attention."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from dtensor_ring import Contiguous, Mask
from dtensor_ring.compute.kernels import KERNELS, Launch, Scores
from dtensor_ring.compute.memory import WHOLE
from dtensor_ring.transport.process_group import ProcessGroupTransport
from dtensor_ring.transport.protocol import P2P, Transport
from gpu_steps.alone import Attention, best_kernels, median_seconds
from gpu_steps.machine import Finding, Machine, captured, no_waiting

EXPOSED = 0.1
"""Of a message beside a tile, at most: an aim."""


def messages(machine: Machine) -> Iterator[Finding]:
    with machine.connected() as mesh:
        transport = ProcessGroupTransport(mesh.get_group())
        transport.prepare(torch.device(machine.device))
        sent, received = _shard(machine)
        hop = partial(_hop, transport, sent, received)
        yield _arrives("message to itself", hop, sent, received)
        yield _arrives("message to itself, without waiting", hop, sent, received, no_waiting)
        graph = captured(hop)
        yield _arrives("message to itself, in a CUDA graph", graph.replay, sent, received)
        seconds = median_seconds(hop, machine.repeats)
        yield Finding("message to itself, GB/s", f"{sent.nbytes / seconds / 1e9:.0f}")
        for kernel in best_kernels(machine.device):
            yield _beside(machine, kernel, hop, seconds)


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
    """How much longer a tile takes with a message in flight, as a part of the message."""
    attention = Attention(kernel, 1, machine.side, Contiguous(), Mask.full(), device=machine.device)
    _, query, key, value = attention.inputs()
    scores = Scores(attention.mask, attention.head_dim**-0.5)
    stream = torch.cuda.Stream()

    def tile(has_message: bool) -> None:
        launch = Launch(WHOLE, WHOLE, attention.mask, in_flight=has_message)
        stream.wait_stream(torch.cuda.current_stream())
        if has_message:
            with torch.cuda.stream(stream):
                hop()
        KERNELS[kernel].forward(query, key, value, launch, scores)
        torch.cuda.current_stream().wait_stream(stream)

    free, loaded = (
        median_seconds(partial(tile, has_message), machine.repeats) for has_message in (False, True)
    )
    exposed = (loaded - free) / alone
    aim = f"at most {EXPOSED:.0%} exposed" if exposed > EXPOSED else ""
    found = f"{1e3 * free:.2f} ms, {1e3 * loaded:.2f} ms with a message, {exposed:.0%} exposed"
    return Finding(f"tile of {kernel} beside a message of {1e3 * alone:.2f} ms", found, aim)
