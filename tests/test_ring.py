"""The two loops: who sends what to whom, and that the sums come home."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.compute.accumulate import GradientSum
from dtensor_ring.compute.kernels import KERNELS, Saved, Scores
from dtensor_ring.planning.demand import Cols
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport.transport import ProcessGroupTransport
from tests.dense import dense_attention, largest
from tests.pool import Pool
from tests.rings import Ring
from tests.transport.test_rotation import RINGS, Message, messages_of, recorded

CAUSAL, FULL = Mask.causal(), Mask.full()
PER_COLUMN = 2 * 2 * (8 + 4)  # numbers of key and value: batch, heads, head dims
Hops = list[list[Message]]


@pytest.mark.parametrize("ring", RINGS.values(), ids=list(RINGS))
def test_messages(pool: Pool, ring: Ring) -> None:
    for rank, (forward, backward, errors) in enumerate(pool.run(ring.world_size, _run, ring)):
        plan = ring.plans()[rank]
        expected = messages_of(plan.shards, PER_COLUMN, torch.bfloat16)
        assert forward == expected, f"rank {rank}"
        shards = [[m for m in hop if m.dtype == torch.bfloat16] for hop in backward]
        assert [hop for hop in shards if hop] == expected, f"rank {rank}"
        sums = [[m for m in hop if m.dtype == torch.float32] for hop in backward]
        expected = messages_of(plan.sums, PER_COLUMN, torch.float32)
        assert [hop for hop in sums if hop] == expected, f"rank {rank}"
        assert largest(errors.values()) < 0.05, f"rank {rank}: {errors}"


@pytest.mark.parametrize(
    "ring",
    [
        *(Ring(ZigZag(), world_size, 16, CAUSAL) for world_size in (1, 2, 4)),
        *(Ring(Striped(), world_size, 48, CAUSAL) for world_size in (1, 2, 3, 4)),
        *(Ring(layout, 3, 12, FULL) for layout in (Contiguous(), Striped(), ZigZag())),
    ],
    ids=lambda ring: f"{ring.layout.name} {ring.mask.right} {ring.world_size}",
)
def test_a_ring_makes_one_hop_less_than_it_has_ranks(pool: Pool, ring: Ring) -> None:
    num_hops = ring.world_size - 1
    for forward, backward, _ in pool.run(ring.world_size, _run, ring):
        assert [len(hop) for hop in forward] == [2] * num_hops, "a send and a receive each"
        sends = [m for hop in backward for m in hop if m.what == "isend"]
        receives = [m for hop in backward for m in hop if m.what == "irecv"]
        # Shards as in forward; sums make as many hops, the one home included.
        assert (len(sends), len(receives)) == (2 * num_hops, 2 * num_hops)


@pytest.mark.parametrize("name", ["zigzag", "direct", "direct, documents"])
def test_sums_are_rounded_with_the_last_that_comes_home(pool: Pool, name: str) -> None:
    ring = RINGS[name]
    for plan, are_last in zip(
        ring.plans(), pool.run(ring.world_size, _come_home, ring), strict=True
    ):
        sources = [transfer.source for hop in plan.sums for transfer in hop.receives]
        num_homes = sources.count(plan.rank)
        expected = [index == num_homes for index in range(1, num_homes + 1) for _ in "kv"]
        assert are_last == expected, f"rank {plan.rank}"


def _come_home(ring: Ring) -> list[bool]:
    """Of each sum for a key or a value, whether it was added as the last."""
    are_last: list[bool] = []
    add_arrived = GradientSum.add_arrived

    def add(self: GradientSum, home: Tensor, cols: Cols, is_last: bool) -> None:
        are_last.append(is_last)
        add_arrived(self, home, cols, is_last)

    with patch.object(GradientSum, "add_arrived", add):
        _run(ring)
    return are_last


def _run(ring: Ring) -> tuple[Hops, Hops, dict[str, float]]:
    """Messages of forward and of backward, and how far the results are from dense."""
    rank, batch = dist.get_rank(), 2
    plan, positions = ring.plans()[rank], ring.positions(rank)
    shapes = (4, 8), (2, 8), (2, 4), (4, 4)
    whole = [torch.randn(batch, n, ring.seq_len, h).bfloat16() for n, h in shapes]
    query, key, value, grad_out = (x[:, :, positions] for x in whole)
    kernel, scores = KERNELS["reference"], Scores(ring.mask, 0.4)
    with recorded() as forward:
        out, lse = ring_forward(
            query, (key, value), plan, kernel, scores, ProcessGroupTransport(dist.group.WORLD)
        )
    with recorded() as backward:
        saved = Saved(grad_out, out, lse)
        grads = ring_backward(
            saved,
            query,
            (key, value),
            plan,
            kernel,
            scores,
            ProcessGroupTransport(dist.group.WORLD),
        )
    dense = dense_attention(*whole[:3], ring.mask, cu_seqlens=ring.cu_seqlens(), scale=0.4)
    expected = [dense.out, dense.lse, *dense.backward(whole[3])]
    errors = {}
    for name, x, y in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), expected, strict=True
    ):
        seen = y[:, :, positions] != -torch.inf
        difference = (x - y[:, :, positions])[seen].abs()
        scale = y[y != -torch.inf].abs().max()
        errors[name] = (difference.max() / scale).item() if x.numel() else 0.0
    return forward, backward, errors
