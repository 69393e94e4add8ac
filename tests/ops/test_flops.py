"""Flops are counted by what is visible."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from dtensor_ring import Contiguous, Mask, Striped, ZigZag, ring_attention, shard_sequence
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.ops.options import Batch, Call, Place, flatten
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.planning.slices import Slices
from tests.pool import Pool
from tests.rings import Case, Ring, fake_group

CAUSAL, FULL = Mask.causal(), Mask.full()
SLICES = Slices([(0, 9), (9, 16)], [(0, 9), (3, 9)], [(3, 0), (None, None)])

DOCUMENTS = ((0, 3, 11, 16),)
BY_ROW = ((0, 3, 16), (0, 9, 14))


@pytest.mark.parametrize(
    "ring",
    [
        Ring(ZigZag(), 4, 16, CAUSAL),
        Ring(Contiguous(), 4, 13, Mask(5, 1)),
        Ring(Striped(), 2, 16, CAUSAL, DOCUMENTS),
        Ring(ZigZag(), 4, 16, FULL, BY_ROW),
        Ring(ZigZag(), 4, 16, Mask.prefix_causal(2), BY_ROW),
        Ring(ZigZag(), 2, 16, FULL, DOCUMENTS, 9, ((0, 5, 5, 9),)),
        Ring(ZigZag(), 2, 16, FULL, slices=SLICES),
    ],
    ids=["causal", "band", "documents", "by row", "prefix", "cross", "slices"],
)
def test_flops_are_those_of_the_visible_pairs(pool: Pool, ring: Ring) -> None:
    flops = [pool.run(1, _flops, ring, rank)[0] for rank in range(ring.world_size)]
    pairs = 4 * int(ring.visible().sum())  # of two batch rows and four heads
    assert sum(forward for forward, _ in flops) == pairs * 2 * (8 + 6)
    assert sum(backward for _, backward in flops) == pairs * 2 * (3 * 8 + 2 * 6)


def _flops(ring: Ring, rank: int) -> tuple[int, int]:
    with fake_group(ring.world_size, rank):
        case = Case(ring, head_dims=(8, 6))
        shards = case.shards(rank)
        with FlopCounterMode(display=False) as forward:
            out, _ = case.attend(*shards)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("documents", [None, DOCUMENTS, BY_ROW])
def test_flops_of_dtensors_are_those_of_all_ranks(
    pool: Pool, documents: tuple[tuple[int, ...], ...] | None
) -> None:
    pairs = 4 * int(Ring(ZigZag(), 4, 16, CAUSAL, documents).visible().sum())
    expected = pairs * 2 * (8 + 8), pairs * 2 * (3 * 8 + 2 * 8)
    assert pool.run(1, _flops_of_dtensors, documents) == [expected]


def _flops_of_dtensors(documents: tuple[tuple[int, ...], ...] | None) -> tuple[int, int]:
    with fake_group(4, 1):
        mesh = init_device_mesh("cpu", (4,))
        whole = torch.randn(2, 4, 16, 8, requires_grad=True)
        x = shard_sequence(whole, mesh, 2, "zigzag")
        bounds = None if documents is None else torch.tensor(documents, dtype=torch.int32)
        bounds = bounds if bounds is None or len(bounds) > 1 else bounds[0]
        with FlopCounterMode(display=False) as forward:
            out = ring_attention(x, x, x, cu_seqlens=bounds)
        with FlopCounterMode(display=False) as backward:
            out.to_local().sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_compilers_count_an_even_share_without_boundaries(
    pool: Pool, is_packed: bool, is_dynamic: bool
) -> None:
    pairs = 2 * 4 * (16 * 17 // 2) // 4
    assert pool.run(1, _flops_of_fakes, is_packed, is_dynamic) == [pairs * 2 * (8 + 8)]


def _flops_of_fakes(is_packed: bool, is_dynamic: bool) -> int:
    real, bounds = torch.empty(2, 4, 4, 8), torch.empty(3, dtype=torch.int32)
    with fake_group(4, 1), FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x, fake_bounds = (mode.from_tensor(t, static_shapes=not is_dynamic) for t in (real, bounds))
        seq_len = 4 * x.shape[2]
        assert isinstance(seq_len, torch.SymInt) == is_dynamic
        group_name = torch.distributed.group.WORLD.group_name
        call = Call(
            Batch(fake_bounds if is_packed else None),
            Scores(Mask.causal(), 1.0),
            Place("contiguous", "ring", seq_len, seq_len, group_name),
        )
        with FlopCounterMode(display=False) as counter:
            ring_op(x, x, x, *flatten(call))
        return counter.get_total_flops()
