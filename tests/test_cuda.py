"""What a ring promises on a GPU: nothing waits on the host, and CUDA graphs capture it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_steps.graphs import captured, no_waiting
from dtensor_ring.compute.kernels import KERNELS, Saved, Scores
from dtensor_ring.planning.plan import Plan
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport.transport import P2P, Transport, Work
from tests.test_played import RINGS
from tests.tiles import GPU

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 64
RANK = 1
NAMES = ("zigzag", "striped", "window", "documents", "striped documents", "window and documents")


class Done:
    """A message that was copied at once."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Nowhere(Transport):
    """A transport without others: what arrives are always the same numbers."""

    def __init__(self, numbers: Tensor, dtype: torch.dtype) -> None:
        self._numbers = {torch.float32: numbers.float(), dtype: numbers.to(dtype)}

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        for message in receives:
            message.flat.copy_(self._numbers[message.flat.dtype][: message.flat.numel()])
        return [Done() for _ in receives + sends]


def rank_of(name: str, kernel: str, device: str, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """Forward and backward of a rank."""
    ring = RINGS[name]
    mine: Plan = ring.plans()[RANK]
    num_rows = len(ring.positions(RANK))
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, num_rows, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    query, key, value, grad_out = (x.transpose(1, 2) for x in tensors)
    numbers = torch.randn(2 * key.numel(), generator=generator).to(device)
    block, scores, transport = KERNELS[kernel], Scores(ring.mask, 0.125), Nowhere(numbers, dtype)

    @torch.no_grad()
    def run() -> list[Tensor]:
        out, lse = ring_forward(query, (key, value), mine, block, scores, transport)
        saved = Saved(grad_out, out, lse)
        grads = ring_backward(saved, query, (key, value), mine, block, scores, transport)
        return [out, lse, *grads]

    return run


def available(kernel: str, name: str) -> None:
    """Skips where the kernel cannot."""
    problem = RINGS[name].problem("cuda", torch.bfloat16, HEAD_DIM, HEAD_DIM)
    reason = KERNELS[kernel].missing() or KERNELS[kernel].supports(problem)
    if reason:
        pytest.skip(f"{kernel}: {reason}")


def assert_like_the_reference(results: list[Tensor], name: str) -> None:
    """Rounded as bfloat16 is; gradients are of the size of what arrives."""
    expected = rank_of(name, "reference", results[0].device.type, torch.bfloat16)()
    for x, y in zip(results, expected, strict=True):
        largest = y.masked_fill(y == -torch.inf, 0).abs().max().item()
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 * max(1.0, largest))


every_kernel = pytest.mark.parametrize("kernel", GPU)


@pytest.mark.gpu
@every_kernel
@pytest.mark.parametrize("name", NAMES)
def test_the_host_does_not_wait(name: str, kernel: str) -> None:
    available(kernel, name)
    run = rank_of(name, kernel, "cuda", torch.bfloat16)
    run()  # compiles, and copies boundaries
    torch.cuda.synchronize()
    with no_waiting():
        results = run()
    assert_like_the_reference(results, name)


@pytest.mark.gpu
@every_kernel
@pytest.mark.parametrize("name", NAMES[:3])
def test_graphs_capture_what_has_no_documents(name: str, kernel: str) -> None:
    available(kernel, name)
    run = rank_of(name, kernel, "cuda", torch.bfloat16)
    graph, results = captured(run)
    for x in results:
        x.zero_()
    graph.replay()
    assert_like_the_reference(results, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_alone_on_a_cpu(name: str) -> None:
    """The checks above, on what runs here."""
    assert_like_the_reference(rank_of(name, "cpu_flash", "cpu", torch.bfloat16)(), name)
