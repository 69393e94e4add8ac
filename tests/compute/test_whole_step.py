"""Steps whose tiles are one launch, and launches whose documents change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring import Balanced, Contiguous, Mask, Striped, ZigZag, register_kernel
from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.changing import ChangingSegments
from dtensor_ring.compute.dropout import ShardDropout
from dtensor_ring.compute.execute import forward_step
from dtensor_ring.compute.kernels import KERNELS, Launch, Saved, Scores
from dtensor_ring.compute.kernels.emulated import WidenedKernel
from dtensor_ring.compute.kernels.kernel import Gradients, Kernel, Result
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import unregister_kernel
from dtensor_ring.compute.trace import Label
from dtensor_ring.compute.whole_step import whole_step
from dtensor_ring.planning.changing import ChangingDocuments
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.tile import CAUSAL, FULL
from dtensor_ring.ring import ring_backward, ring_forward
from tests.fake_cuda import Graph
from tests.intervals import CASES, OPTIONS, IntervalsCase, OneLaunch, check_intervals
from tests.pool import Pool
from tests.rings import Case, Ring
from tests.test_cuda import Nowhere
from tests.test_played import Played, check_ring

SEQ_LEN = 192
SIXTEEN = (tuple(range(0, SEQ_LEN + 1, 12)),)
ENDS = ((0, 3, 50, 51, 120, 192),)
BY_ROW = ENDS[0], (0, 1, 2, 3, 64, 180)


@pytest.fixture
def one_launch() -> Iterator[OneLaunch]:
    kernel = OneLaunch()
    register_kernel(kernel)
    yield kernel
    unregister_kernel(kernel.name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_the_reference_of_intervals(name: str, option: str | None) -> None:
    given = CASES[name]
    if option is not None:
        given = IntervalsCase(given.tiles, replace(given.case, **OPTIONS[option]))
    check_intervals(OneLaunch(), given)


def test_a_gradient_of_lse_in_columns() -> None:
    """Which kernels of intervals without one of their own get."""
    given = CASES["window"]
    options = {"heads": (4, 2), "grad_lse": True}
    kernel = WidenedKernel(OneLaunch())
    assert kernel.has_intervals
    check_intervals(kernel, IntervalsCase(given.tiles, replace(given.case, **options)))


LAYOUTS = {
    "contiguous": lambda size: Contiguous(),
    "zigzag": lambda size: ZigZag(),
    "striped": lambda size: Striped(),
    "balanced": lambda size: Balanced(CAUSAL, SEQ_LEN, size, ENDS, 8),
}
SEEN = {
    "causal": (CAUSAL, None),
    "window": (Mask.sliding(20), None),
    "documents": (CAUSAL, ENDS),
    "window and documents by row": (Mask.sliding(9), BY_ROW),
    "chunked": (Mask.chunked(30), None),
    "prefix": (Mask.prefix_causal(10), ENDS),
}


@pytest.mark.pairs
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seen", SEEN)
def test_rings(
    size: int, layout: str, seen: str, one_launch: OneLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, against dense attention; each step is a launch, or none."""
    mask, documents = SEEN[seen]
    ring = Ring(LAYOUTS[layout](size), size, SEQ_LEN, mask, documents)
    check_ring(Case(ring), Played("one_launch", "cpu", torch.float32), monkeypatch)
    steps = [step for plan in ring.plans() for step in plan.steps if step.tiles]
    for launches in (one_launch.forwards, one_launch.backwards):
        assert len(launches) == len(steps)
        assert sum(x.intervals is None for x in launches) == sum(len(x.tiles) == 1 for x in steps)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seen", ["window", "window and documents by row"])
def test_ops_with_a_gradient_of_lse(pool: Pool, size: int, seen: str) -> None:
    """By processes, and named in the call."""
    mask, documents = SEEN[seen]
    ring = Ring(ZigZag(), size, SEQ_LEN, mask, documents)
    case = Case(ring, torch.float64, kernel="one_launch", grad_lse=True, sinks=(0.5, -1.0, 2.0, 0))
    for rank, (found, num_launches) in enumerate(pool.run(size, of_op, case)):
        steps = [step for step in ring.plans()[rank].steps if step.tiles]
        assert num_launches == (len(steps), len(steps))
        for what, actual, whole in zip(NAMES, found, case.expected(), strict=True):
            here = whole if what == "sinks" else whole[:, :, ring.positions(rank)]
            torch.testing.assert_close(actual, here, msg=lambda m, what=what: f"{what}: {m}")


NAMES = "out", "lse", "dq", "dk", "dv", "sinks"


def of_op(case: Case) -> tuple[list[Tensor], tuple[int, int]]:
    """Results of this rank, those of sinks summed over all; launches of forward and backward."""
    kernel, rank = OneLaunch(), dist.get_rank()
    register_kernel(kernel)
    try:
        shards = case.shards(rank)
        results = case.attend(*shards)
        slopes = [x[:, :, case.ring.positions(rank)] for x in case.grads()]
        *grads, of_sinks = torch.autograd.grad(results, shards, slopes)
    finally:
        unregister_kernel(kernel.name)
    dist.all_reduce(of_sinks)
    found = [x.detach() for x in (*results, *grads, of_sinks)]
    return found, (len(kernel.forwards), len(kernel.backwards))


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses:2"])
def test_other_routes(
    strategy: str, one_launch: OneLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = Slices.global_tokens([[0, 80, SEQ_LEN], [0, 100, 180]], [[4, 9], [2, 0]], 16)
    ring = Ring(ZigZag(), 4, SEQ_LEN, FULL, slices=slices, strategy=strategy)
    case = Case(ring, sinks=(0.5, -1.0, 2.0, 0.0), softcap=2.0)
    check_ring(case, Played("one_launch", "cpu", torch.float32), monkeypatch)
    assert any(x.intervals is not None for x in one_launch.backwards)


@pytest.mark.parametrize(
    ("layout", "mask", "documents", "most_tiles"),
    [
        ("zigzag", Mask.sliding(20), None, 2),
        ("striped", CAUSAL, SIXTEEN, 16),
        ("zigzag", CAUSAL, SIXTEEN, 4),
        ("balanced", CAUSAL, ENDS, 3),
    ],
    ids=["window", "striped, 16 documents", "16 documents", "balanced"],
)
def test_a_step_is_one_launch(
    layout: str, mask: Mask, documents: tuple | None, most_tiles: int, one_launch: OneLaunch
) -> None:
    """Where other kernels launch up to that many tiles, or their segments."""
    ring = Ring(LAYOUTS[layout](4), 4, SEQ_LEN, mask, documents)
    found = 0
    for of_rank in ring.plans():
        num_rows = len(ring.positions(of_rank.rank))
        for step in of_rank.steps:
            one_launch.forwards.clear()
            run_step(step, one_launch, torch.randn(2, 2, num_rows, 8))
            assert len(one_launch.forwards) == bool(step.tiles)
            found = max(found, len(step.tiles))
    assert found >= most_tiles


def run_step(step: object, kernel: Reference, query: Tensor, **options: object) -> Tensor:
    """Out of a step whose keys and values are all ones."""
    key = torch.ones(*query.shape[:2], len(step.cols), 8)  # type: ignore[attr-defined]
    running, label = RunningOutput(query, 8), Label("forward", 0, 0)
    how = running, kernel, Scores(FULL, 1.0), label
    forward_step(step, query, (key, key), *how, **options)  # type: ignore[arg-type]
    return running.result()[0]


def test_other_kernels_launch_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do steps of few queries, whose tables would be made for each token."""
    step = Ring(ZigZag(), 2, SEQ_LEN, Mask.sliding(20)).plans()[0].steps[0]
    assert len(step.tiles) > 1
    launches: list[Launch] = []
    forward = Reference.forward

    def noting(self: Reference, q: Tensor, k: Tensor, v: Tensor, *how: object) -> object:
        launches.append(how[0])  # type: ignore[arg-type]
        return forward(self, q, k, v, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(Reference, "forward", noting)
    query = torch.randn(1, 2, SEQ_LEN // 2, 8)
    for kernel, options in ((KERNELS["reference"], {}), (OneLaunch(), {"joins_tiles": False})):
        launches.clear()
        run_step(step, kernel, query, **options)  # type: ignore[arg-type]
        assert len(launches) == len(step.tiles)
        assert all(x.intervals is None for x in launches)


def test_weights_that_are_dropped() -> None:
    """They are those of the tiles."""
    of_rank = Ring(ZigZag(), 2, SEQ_LEN, Mask.sliding(20), BY_ROW).plans()[0]
    step = of_rank.steps[0]
    query = torch.randn(2, 2, SEQ_LEN // 2, 8)
    dropped = ShardDropout(0.4, torch.tensor(3), (0, 0), query, of_rank.runs)
    dropout = dropped.of_keys(step.runs, step.cols)
    found, expected = (
        run_step(step, kernel, query, dropout=dropout)
        for kernel in (OneLaunch(), KERNELS["reference"])
    )
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, run_step(step, OneLaunch(), query))


def test_a_launch_is_made_once() -> None:
    step = Ring(ZigZag(), 2, SEQ_LEN, Mask.sliding(20)).plans()[0].steps[0]
    (launch,), (in_flight,) = whole_step(step, 2), whole_step(step, 2, True)
    assert whole_step(step, 2)[0] is launch
    assert whole_step(step, 2, True)[0] is in_flight
    assert (launch.in_flight, in_flight.in_flight) == (False, True)
    assert launch.intervals is in_flight.intervals, "one copy on a device"
    assert whole_step.num_bytes >= 2 * launch.intervals.num_bytes


def test_a_launch_covers_what_its_tiles_reach() -> None:
    """So no partial result is larger than it has to be."""
    documents = (0, 96, 192), (0, 10, 100)
    steps = Ring(Contiguous(), 4, SEQ_LEN, CAUSAL, documents).plans()[2].steps
    (launch,) = whole_step(steps[0], 2)
    assert (launch.rows[0], launch.rows[2]) == (slice(None), slice(0, 48))
    (of_one,) = whole_step(replace(steps[0], tiles=steps[0].tiles[:1]), 2)
    assert (of_one.rows[0], of_one.rows[2], of_one.cols[2]) == (
        slice(0, 1),
        slice(0, 48),
        slice(0, 48),
    )


# Launches whose documents change: a graph of one packing, replayed, has the bits of all others.

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
