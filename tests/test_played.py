"""Ranks as threads of one process, and the pool of processes that outlive a test."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring import Balanced, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.compute import accumulate
from dtensor_ring.compute.kernels import Saved, Scores, named_kernel
from dtensor_ring.compute.memory import Accumulation
from dtensor_ring.compute.merge import accumulate_sums
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.plan import Documents
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport import rotation
from dtensor_ring.transport.transport import DEFAULT_POLICY, P2P, TransferPolicy, Work
from tests.played import PlayedTransport, play
from tests.pool import DROPPED, Pool, RankError
from tests.rings import Case, Ring
from tests.tiles import GPU, HUB, sized

CAUSAL, WINDOW = Mask.causal(), Mask.sliding(40)
SEQ_LEN = 512
SHARED = ((0, 3, 130, 131, 200, 300, 512),)
BY_ROW = SHARED[0], (0, 1, 2, 3, 64, 128, 500)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def ring(layout: Layout, mask: Mask, documents: Documents | None = None, size: int = 4) -> Ring:
    return Ring(layout, size, SEQ_LEN, mask, documents)


RINGS = {
    "zigzag": ring(ZigZag(), CAUSAL),
    "zigzag, 8 ranks": ring(ZigZag(), CAUSAL, size=8),
    "striped": ring(Striped(), CAUSAL),
    "contiguous": ring(Contiguous(), CAUSAL),
    "full": ring(Contiguous(), Mask.full()),
    "window": ring(ZigZag(), WINDOW),
    "striped window": ring(Striped(), WINDOW),
    "both sides": ring(Contiguous(), Mask.local(30, 20)),
    "both sides and documents": ring(Striped(), Mask(1, 5), SHARED),
    "documents": ring(ZigZag(), CAUSAL, SHARED),
    "documents by row": ring(Contiguous(), CAUSAL, BY_ROW),
    "striped documents": ring(Striped(), CAUSAL, BY_ROW),
    "window and documents": ring(ZigZag(), WINDOW, SHARED),
    "balanced documents": ring(Balanced(CAUSAL, SEQ_LEN, 4, SHARED, 32), CAUSAL, SHARED),
    "all-gather": replace(ring(ZigZag(), CAUSAL), strategy="all_gather"),
    "two groups": replace(ring(ZigZag(), CAUSAL), strategy="ulysses:2"),
    "three groups of documents": replace(
        ring(ZigZag(), WINDOW, BY_ROW, size=6), strategy="ulysses:2+all_gather"
    ),
    "one group": replace(ring(Striped(), CAUSAL), strategy="ulysses"),
}


@dataclass(frozen=True)
class Played:
    """What runs a case: a kernel on a device."""

    kernel: str
    device: str
    dtype: torch.dtype


ON_CPU = [Played("reference", "cpu", torch.float32), Played("cpu_flash", "cpu", torch.bfloat16)]
ON_GPU = [Played("reference", "cuda", torch.float32)]
ON_GPU += [Played(name, "cuda", torch.bfloat16) for name in GPU]
CASES = {name: Case(ring) for name, ring in RINGS.items()}
for name in ("zigzag", "window and documents"):
    CASES[f"{name}, softcap"] = Case(RINGS[name], softcap=2.0)  # the turn of the reference
    CASES[f"{name}, sinks"] = Case(RINGS[name], sinks=(0.5, -1.0, 2.0, 0.0))


def by_every_kernel() -> Iterator[Any]:
    """Each case and kernel; those of CPUs, whose rings are the same, have the cases in turns."""
    for number, (name, case) in enumerate(CASES.items()):
        for turn, played in enumerate(ON_CPU + ON_GPU):
            is_kept = number % len(ON_CPU) == turn
            mark = pytest.mark.gpu if played in ON_GPU else () if is_kept else pytest.mark.repeats
            which = f"{name}-{played.kernel} on {played.device}"
            yield pytest.param(case, played, id=which, marks=mark)


@pytest.mark.parametrize(("case", "played"), [*by_every_kernel()])
def test_ring(case: Case, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    if played.device == "cuda":
        case = replace(case, head_dims=(64, 64))
    check_ring(case, played, monkeypatch)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["zigzag", "window", "documents", "all-gather", "two groups"])
def test_ring_of_large_messages(batch: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values go from where they lie, and nobody writes there."""
    monkeypatch.setattr(rotation, "LARGE", 1)
    check_ring(replace(CASES[name], batch=batch), ON_CPU[0], monkeypatch)


def check_ring(case: Case, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks against dense attention; skips what the kernel cannot."""
    case = sized(played.kernel, replace(case, dtype=played.dtype))
    kernel, ring = named_kernel(played.kernel), case.ring
    is_of_gpu = played.kernel in GPU + HUB
    problem = ring.problem(
        *("cuda" if is_of_gpu else played.device, torch.bfloat16 if is_of_gpu else played.dtype),
        *(*case.head_dims, case.scale, case.softcap),
    )
    if reason := kernel.missing() or kernel.supports(problem):
        pytest.skip(f"{kernel.name}: {reason}")
    monkeypatch.setattr(accumulate, "accumulate_sums", accumulate_and_spoil)
    results = play(ring.world_size, lambda rank, transport: of_rank(case, played, rank, transport))
    for rank, of_this in enumerate(results):
        for what, actual, whole in zip(
            ("out", "lse", "dq", "dk", "dv"), of_this, case.expected(), strict=False
        ):
            expected = whole[:, :, ring.positions(rank, of_keys=what in ("dk", "dv"))]
            assert actual.shape == expected.shape
            actual = actual.cpu().double()
            difference = (actual - expected).masked_fill_(actual == expected, 0)
            largest = max(1.0, whole.abs().nan_to_num(posinf=0.0).max().item())
            assert difference.abs().max() <= TOLERANCES[played.dtype] * largest, (rank, what)


def accumulate_and_spoil(one: Accumulation) -> None:
    """Nothing may read the parts any more."""
    accumulate_sums(one)
    for part in one.partials:
        if part.x is not one.target:
            part.x.fill_(torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_gradients_may_travel_narrow(dtype: torch.dtype) -> None:
    case = Case(RINGS["zigzag"], dtype)
    played = Played("reference", "cpu", dtype)
    sent: list[torch.dtype] = []

    class Counting(PlayedTransport):
        def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
            sent.extend(message.flat.dtype for message in sends)
            return super().start(receives, sends)

    def run(rank: int, transport: PlayedTransport) -> tuple[Tensor, ...]:
        transport.__class__ = Counting
        return of_rank(case, played, rank, transport, TransferPolicy(grad_dtype=torch.float16))

    results = play(case.ring.world_size, run)
    num_hops = case.ring.world_size - 1
    assert sent.count(torch.float16) == 4 * num_hops, "one sum less than ranks, from each rank"
    assert sent.count(dtype) == 2 * 4 * num_hops, "shards, forward and backward"
    for rank, (_, _, _, *grads) in enumerate(results):
        positions = case.ring.positions(rank)
        for grad, whole in zip(grads, case.expected()[3:], strict=True):
            assert grad.dtype == dtype
            error = (grad.double() - whole[:, :, positions]).abs().max() / whole.abs().max()
            assert error < (3e-3 if dtype == torch.float32 else 2e-2)
            assert error > 1e-6, "they were rounded"


def of_rank(
    case: Case,
    played: Played,
    rank: int,
    transport: PlayedTransport,
    policy: TransferPolicy = DEFAULT_POLICY,
) -> tuple[Tensor, ...]:
    """Out, lse and gradients of a rank's query, key and value."""
    plan = case.ring.plans()[rank]
    query, key, value, *sinks = (x.to(played.device) for x in case.shards(rank))
    kernel = named_kernel(played.kernel)
    scores = Scores(case.ring.mask, case.scale, case.softcap, *sinks)
    grad_out = case.grads()[0][:, :, case.ring.positions(rank)].to(played.device)
    out, lse = ring_forward(query, (key, value), plan, kernel, scores, transport)
    saved = Saved(grad_out, out, lse)
    grads = ring_backward(saved, query, (key, value), plan, kernel, scores, transport, policy)
    return out, lse, *grads


def test_a_rank_that_fails() -> None:
    """The others do not wait for it, and its error is the one that is told."""

    def fails(rank: int, transport: PlayedTransport) -> None:
        for work in transport.start([P2P(torch.zeros(1), 1 - rank)], []):
            if rank == 1:
                raise ValueError("no more")
            work.wait()

    with pytest.raises(ValueError, match="no more"):
        play(2, fails)


# What the worker processes do with a run that fails.


def _fail(marks: Path, num_failures: int, message: str) -> int:
    """The number of this attempt; rank 1 alone fails the first `num_failures` of them."""
    mark = marks / f"rank {dist.get_rank()}"
    attempt = len(mark.read_text()) if mark.exists() else 0
    mark.write_text("x" * (attempt + 1))
    if dist.get_rank() == 1 and attempt < num_failures:
        raise RuntimeError(message)
    return attempt


def test_runs_again_what_gloo_dropped(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _fail, tmp_path, 1, f"{DROPPED} with: closed by peer") == [1, 1]


@pytest.mark.parametrize(("num_failures", "message"), [(2, DROPPED), (1, "another error")])
def test_raises(pool: Pool, tmp_path: Path, num_failures: int, message: str) -> None:
    with pytest.raises(RankError, match=f"rank 1:(.|\n)*{message}"):
        pool.run(2, _fail, tmp_path, num_failures, message)
    assert (tmp_path / "rank 0").read_text() == "x" * num_failures


def _wait_for_nothing() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_says_where_a_rank_hangs(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(2, _wait_for_nothing, timeout=2)
    reported, hangs = caught.value.tracebacks
    assert reported is None
    assert hangs is not None
    assert "gave no answer in time" in hangs
    assert "in _wait_for_nothing" in hangs
