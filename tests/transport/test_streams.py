"""Kernels and messages of a rank use memory in an order, on all routes, forward and backward.

Each rank runs alone: what arrives are zeros. Its ops and messages are noted, and one wait after
another is left out, to see that each is needed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dtensor_ring import BlockCyclic, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.all_to_all import run
from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.all_to_all.run import TensorShape, messages_of, run_all_to_all
from dtensor_ring.compute.kernels import KERNELS, Saved, Scores
from dtensor_ring.compute.memory import HEAD_MAJOR, TOKEN_MAJOR, Order, empty
from dtensor_ring.compute.trace import Label
from dtensor_ring.decode.run import MERGES, Combine
from dtensor_ring.ops import axis_ops
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.plan import Plan
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport import rotation
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy, Transport
from tests.rings import Ring
from tests.streams import CURRENT, Happened, Trace, TracedTransport, Use, race_in, traced

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 64
CAUSAL, FULL = Mask.causal(), Mask.full()
SIZES = 2, 3, 4
"""Of worlds."""


@pytest.fixture(params=[True, False], ids=["on a gpu", "on a cpu"])
def is_batched(request: pytest.FixtureRequest) -> bool:
    if request.param and torch.version.cuda is None:
        pytest.skip("builds for CPUs make no fake CUDA tensors")
    return request.param


def tensors(is_batched: bool, *shapes: tuple[int, ...], order: Order = TOKEN_MAJOR) -> list[Tensor]:
    dtype, device = (torch.bfloat16, "cuda") if is_batched else (torch.float32, "cpu")
    like = torch.empty(0, dtype=dtype, device=device)
    return [empty(like, shape, order).zero_() for shape in shapes]


@lru_cache(maxsize=1)
def plans_of(ring: Ring) -> list[Plan]:
    return ring.plans()


@dataclass(frozen=True)
class Attention:
    """Forward and backward of a rank of a ring."""

    ring: Ring
    policy: TransferPolicy = DEFAULT_POLICY
    order: Order = TOKEN_MAJOR
    large: int = rotation.LARGE

    @property
    def world_size(self) -> int:
        return self.ring.world_size

    def run(self, rank: int, transport: Transport, is_batched: bool) -> None:
        plan, kernel = (
            plans_of(self.ring)[rank],
            KERNELS["cuda_flash" if is_batched else "cpu_flash"],
        )
        (rows, cols), batch = plan.num_local, self.ring.batch
        sides = (HEADS, rows), (KV_HEADS, cols), (KV_HEADS, cols), (HEADS, rows)
        shapes = [(batch, heads, tokens, HEAD_DIM) for heads, tokens in sides]
        query, key, value, grad_out = tensors(is_batched, *shapes, order=self.order)
        how = plan, kernel, Scores(self.ring.mask, 0.125), transport, self.policy
        with patch.object(rotation, "LARGE", self.large):
            out, lse = ring_forward(query, (key, value), *how)
            ring_backward(Saved(grad_out, out, lse), query, (key, value), *how)
        for x in (query, key, value, grad_out, out, lse):
            x.zero_()  # by the caller: they are the caller's again


@dataclass(frozen=True)
class Exchange:
    """Tokens traded for heads and back, whose gradients travel the same two ways."""

    layout: Layout
    to: Layout
    heads: int
    world_size: int

    def run(self, rank: int, transport: Transport, is_batched: bool) -> None:
        seq_len = 8 * self.world_size + 3
        plan = all_to_all_plan(self.layout, self.to, self.heads, rank, self.world_size, seq_len)
        num_heads, label = (HEADS, KV_HEADS, KV_HEADS), Label("exchange", 0, rank)
        shapes = [(BATCH, heads, plan.num_tokens[0], HEAD_DIM) for heads in num_heads]
        moved = tensors(is_batched, *shapes)
        for is_back in (False, True):
            facts = tuple(map(TensorShape.of, moved))
            messages = messages_of(plan, num_heads, KV_HEADS, facts, is_back)
            moved = run_all_to_all(moved, messages, transport, label)


@dataclass(frozen=True)
class Decoding:
    """Partial results that ranks merge, which has no backward."""

    world_size: int
    merge: str

    def run(self, rank: int, transport: Transport, is_batched: bool) -> None:
        out, lse = tensors(is_batched, (BATCH, HEADS, 3, HEAD_DIM), (BATCH, HEADS, 3, 1))
        combine = Combine(transport, rank, self.world_size, self.merge)
        for _ in range(2):
            combine(out, lse.squeeze(-1))


@dataclass(frozen=True)
class RankSum:
    """A tensor that is summed over the ranks; the gradient is, too."""

    world_size: int

    def run(self, rank: int, transport: TracedTransport, is_batched: bool) -> None:
        (local,) = tensors(is_batched, (1, 1, 5, 16))
        known: dict[str, Any] = {"_resolve_process_group": lambda name: transport.group}
        known["_checked_sum"] = lambda *args: nullcontext(transport)
        with patch.multiple(axis_ops, **known):
            for is_back in (False, True):
                local = axis_ops.sum_ranks(local, "group", is_back)


ROUTES = {
    f"{route}, {size} ranks": Attention(Ring(ZigZag(), size, 64, CAUSAL, strategy=route))
    for route in ("around", "direct", "all_gather")
    for size in SIZES
}
WINDOW = Ring(ZigZag(), 4, 96, Mask.sliding(5))
SHRINKING = Ring(ZigZag(), 4, 64, CAUSAL, ((0, 20, 64), (0, 30, 64)), strategy="around")
RINGS = {
    "full": Attention(Ring(Contiguous(), 3, 20, FULL)),
    "empty shards": Attention(Ring(ZigZag(), 4, 5, FULL)),
    "window": Attention(WINDOW),
    "many ranges": Attention(Ring(BlockCyclic(3), 4, 144, Mask.local(1, 1), strategy="around")),
    "packets that shrink": Attention(SHRINKING),
    "striped documents": Attention(Ring(Striped(), 3, 60, CAUSAL, ((0, 7, 25, 31, 60),))),
    "from where it lies": Attention(Ring(ZigZag(), 4, 64, CAUSAL), large=1),
    "large parts": Attention(WINDOW, large=1),
    "head-major": Attention(Ring(ZigZag(), 3, 48, CAUSAL), order=HEAD_MAJOR, large=1),
    "narrow": Attention(
        SHRINKING, TransferPolicy(torch.float16, torch.bfloat16, num_parts=4), large=1
    ),
}
EXCHANGES = {
    f"{layout.spec} to {to.spec}, {heads} of {size}": Exchange(layout, to, heads, size)
    for layout, to, heads, size in (
        *((ZigZag(), ZigZag(), size, size) for size in SIZES),
        (ZigZag(), Striped(), 1, 3),
        (Contiguous(), ZigZag(), 2, 4),
    )
}
OTHERS: dict[str, Any] = {f"sum, {size} ranks": RankSum(size) for size in SIZES}
OTHERS |= {
    f"decode, {merge}, {size} ranks": Decoding(size, merge) for merge in MERGES for size in SIZES
}
CASES = ROUTES | RINGS | EXCHANGES | OTHERS


READ, WRITTEN, ELSEWHERE = ((Use(0, *at),) for at in ((0, 8, False), (0, 8, True), (8, 16, True)))
READS, PACK, OTHER = (
    Happened("launch", CURRENT, name, uses)
    for name, uses in (("a kernel", READ), ("pack", WRITTEN), ("another", ELSEWHERE))
)
SEND, RECEIVE = (Happened("post", "message 0", "a message", x, message=0) for x in (READ, WRITTEN))
WAIT, LOSS = (Happened(what, CURRENT, message=0) for what in ("wait", "loss"))
FREE = Happened("free", CURRENT, uses=WRITTEN)


@pytest.mark.parametrize(
    ("steps", "race"),
    [
        ([RECEIVE, WAIT, READS, FREE], None),
        ([PACK, SEND, READS, WAIT, PACK, FREE], None),
        ([RECEIVE, OTHER, WAIT], None),
        ([READS, RECEIVE, WAIT, LOSS], None),
        ([RECEIVE, READS, WAIT], "a kernel on the current stream uses memory that a message"),
        ([SEND, PACK, WAIT], "pack on the current stream uses memory that a message"),
        ([SEND, FREE, WAIT], "free on the current stream uses memory that a message"),
        ([RECEIVE, LOSS, WAIT], "memory of a message in flight goes back to the allocator"),
        ([RECEIVE, WAIT, FREE, READS], "a kernel uses memory that was given back"),
    ],
)
def test_what_is_a_race(steps: list[Happened], race: str | None) -> None:
    found = race_in(steps)
    assert found is race if race is None else str(found).startswith(race)


def steps_of(case: Any, rank: int, is_batched: bool) -> list[Happened]:
    """What the host of a rank does."""
    trace = Trace(is_batched)
    with traced(trace):
        case.run(rank, TracedTransport(trace, rank, case.world_size), is_batched)
        trace.step("launch", "what comes after the call")
    return trace.steps


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_memory_is_used_in_an_order(case: Any, is_batched: bool) -> None:
    """And each wait is needed: without it something uses memory that a message still uses."""
    for rank in (0, case.world_size - 1):  # to save time; the others are like these
        steps = steps_of(case, rank, is_batched)
        assert race_in(steps) is None
        posted, waits = (
            [i for i, step in enumerate(steps) if step.what == what] for what in ("post", "wait")
        )
        assert len(posted) == len(waits)
        for index in waits:
            assert race_in(steps, forgotten=index), steps[index]


class Failure(Exception):
    """Something that a user catches, such as a GPU without memory."""


def fail_at(case: Any, what: str, number: int) -> list[Happened]:
    """What a rank's host does if that call of a function fails, the user forgets, and goes on."""
    gc.freeze()  # so that what is collected below is of this call
    trace, calls = Trace(is_batched=True), count()

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            if next(calls) == number:
                raise Failure
            return real(*args, **how)

        return call

    with traced(trace), patched(what, failing):
        # Whoever keeps an error keeps its frames, and what is in them.
        with suppress(Failure):
            case.run(1, TracedTransport(trace, 1, case.world_size), True)
        gc.collect()
        trace.step("launch", "what comes after the failure")
    return trace.steps


@contextmanager
def patched(what: str, by: Callable[..., Any]) -> Iterator[None]:
    owner, name = (run, "_unpack") if what == "unpack" else (KERNELS["cuda_flash"], what)
    with patch.object(owner, name, by(getattr(owner, name))):
        yield


@pytest.mark.skipif(torch.version.cuda is None, reason="there are no fake CUDA tensors")
@pytest.mark.parametrize(
    ("name", "what", "number"),
    [
        *((name, "forward", 0) for name in ROUTES if "3 ranks" in name),
        ("around, 3 ranks", "forward", 1),
        *((name, "backward", number) for name in ROUTES if "4 ranks" in name for number in (0, 2)),
        ("from where it lies", "forward", 0),
        ("packets that shrink", "backward", 3),
        ("zigzag to zigzag, 3 of 3", "unpack", 0),
        ("zigzag to striped, 1 of 3", "unpack", 2),
    ],
)
def test_memory_of_messages_outlives_an_error(name: str, what: str, number: int) -> None:
    """Nobody gets it before the messages are complete, and the current stream need not wait."""
    steps = fail_at(CASES[name], what, number)
    lost = [step.message for step in steps if step.what == "loss"]
    kept = [index for index, step in enumerate(steps) if step.what == "keep"]
    assert race_in(steps) is None
    assert kept
    assert {steps[index].message for index in kept} <= set(lost)
    others = {step.stream for step in steps if step.what == "wait"}
    assert others & {steps[index].stream for index in kept}
