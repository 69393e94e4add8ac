"""Launches whose documents change: a graph of one packing, replayed, has the bits of all others."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_ring import Mask, ZigZag
from dtensor_ring.compute.changing import ChangingSegments
from dtensor_ring.compute.kernels import Launch, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Gradients, Kernel, Result
from dtensor_ring.planning.changing import ChangingDocuments
from dtensor_ring.planning.plan import plan
from dtensor_ring.ring import ring_backward, ring_forward
from tests.fake_cuda import Graph
from tests.test_cuda import Nowhere

TOKENS, ROOM, HEADS, KV_HEADS, HEAD_DIM = 24, 6, 4, 2, 8


def packing(seed: int) -> list[int]:
    """Boundaries of one to all documents; some end before the sequence."""
    random = Random(seed)
    end = TOKENS - random.choice((0, 0, 5))
    return [0, *sorted(random.sample(range(1, end), random.randrange(ROOM))), end]


class ByNumbers(Kernel):
    """Attention of segments that reads their boundaries as a device does, and nothing else."""

    name, has_segments = "by_numbers", True

    def missing(self) -> None:
        return None

    def supports(self, problem: Any) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        logits = self._logits(q, k, launch, scores)
        weights = logits.softmax(-1).nan_to_num(0)
        return torch.einsum("ntu,unh->tnh", weights, _repeated(v, q)), logits.logsumexp(-1)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        logits = self._logits(q, k, launch, scores)
        weights = torch.where(logits.isinf(), 0, (logits - saved.lse.unsqueeze(-1)).exp())
        own = (saved.grad_out * saved.out).sum(-1).T.unsqueeze(-1)
        slope = torch.einsum("tnh,unh->ntu", saved.grad_out, _repeated(v, q)) - own
        slope = weights * slope * scores.scale
        dq = torch.einsum("ntu,unh->tnh", slope, _repeated(k, q))
        pairs = (slope, q), (weights, saved.grad_out)
        each = (torch.einsum("ntu,tnh->unh", *pair) for pair in pairs)
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in each)
        return dq, dk, dv

    def _logits(self, q: Tensor, k: Tensor, launch: Launch, scores: Scores) -> Tensor:
        assert launch.segments is not None
        rows, cols = (x.long() for x in launch.segments.boundaries(q.device))
        at, other = torch.arange(len(q)), torch.arange(len(k))
        of_row, of_col = (
            torch.searchsorted(x, y, right=True) - 1 for x, y in ((rows, at), (cols, other))
        )
        seen = of_row.unsqueeze(1) == of_col
        if launch.mask == Mask.causal():
            seen = seen & ((at - rows[of_row]).unsqueeze(1) >= other - cols[of_col])
        logits = torch.einsum("tnh,unh->ntu", q, _repeated(k, q)) * scores.scale
        return logits.masked_fill(~seen, -torch.inf)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.full()], ids=["causal", "full"])
def test_one_graph_replays_100_packings(mask: Mask) -> None:
    """Forward and backward of a rank of two; what the other rank sends is always the same."""
    documents = ChangingDocuments(TOKENS, ROOM)
    mine = plan(ZigZag(), mask, 1, 2, TOKENS, documents)
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad_out = (
        torch.randn(2, heads, TOKENS // 2, HEAD_DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    numbers = torch.randn(2 * key.numel(), generator=generator)
    kernel, how = ByNumbers(), (Scores(mask, 0.3), Nowhere(numbers, torch.float32))

    def run() -> list[Tensor]:
        out, lse = ring_forward(query, (key, value), mine, kernel, *how)
        saved = Saved(grad_out, out, lse)
        return [out, lse, *ring_backward(saved, query, (key, value), mine, kernel, *how)]

    run()
    with Graph() as graph:
        results = run()
    kept = set()
    for seed in range(100):
        documents.fill(packing(seed))
        graph.replay()
        assert all(map(torch.equal, results, run())), f"packing {seed}"
        kept.add(float(results[0].sum()))
    assert len(kept) > 50, "packings differ"


def test_what_a_capture_reads_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that would read the boundaries on the host keeps those of the capture."""
    positions = torch.arange(TOKENS).numpy()
    documents = ChangingDocuments(TOKENS, ROOM)
    segments = ChangingSegments(documents, positions, positions, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for read in (lambda: segments.rows, lambda: list(segments.tiles())):
        with pytest.raises(RuntimeError, match=r"documents that change; .* kernel='cuda_flash'"):
            read()
    with pytest.raises(RuntimeError, match="are not on the GPU yet; run the same attention"):
        segments.boundaries(torch.device("cuda"))
    assert (segments.max_rows, segments.has_empty_rows) == (TOKENS, True)
