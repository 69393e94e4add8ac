"""Random attentions over rings against dense float64, of every kind at once.

100 of them are the same in every run, and 750 with `--all-cases`. `pytest tests/test_fuzz.py
--fuzz-cases 80` draws 2,000 new ones, and with 800 it is 20,000: it prints the seed, which
`--fuzz-seed` takes to draw them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dtensor_ring import Balanced, SequenceAxis, ring_attention, sequence_runs
from dtensor_ring.all_to_all.ulysses import ulysses_attention
from dtensor_ring.dtensor.annotation import annotation_of
from dtensor_ring.ops.options import flatten
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.planning.strategy import as_strategy
from dtensor_ring.transport import quantised_rotation
from tests.drawn import TOLERANCES, cases, different
from tests.layouts import LAYOUTS
from tests.played_group import PlayedGroup, play_group
from tests.pool import Pool
from tests.rings import Case, local

BATCH_OF_CASES = 25
SMALL = 5


@dataclass(frozen=True)
class Setting:
    """Ranks in all, and on the ring; with more than one ring they are a 2-D mesh of DTensors."""

    num_ranks: int
    world_size: int

    def part_of(self, whole: Tensor, case: Case, rank: int, of_keys: bool = False) -> Tensor:
        """What a rank holds, its tokens as in `local`; batches are sharded if they can be."""
        replica, ring_rank = divmod(rank, self.world_size)
        num_replicas = self.num_ranks // self.world_size
        if whole.ndim > 1 and case.batch % num_replicas == 0:
            whole = whole.chunk(num_replicas)[replica]
        # Tokens that the attention exchanges are sharded as without: the op alone has them of a
        # group.
        ring = replace(case.ring, strategy="ring") if case.trades else case.ring
        return local(whole, ring.positions(ring_rank, of_keys))


SETTINGS = [Setting(1, 1), Setting(2, 2), Setting(3, 3), Setting(4, 4), Setting(4, 2)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a shard has several blocks of a scale each, and packets begin within one."""
    monkeypatch.setattr(quantised_rotation, "BLOCK_SIZE", SMALL)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.num_ranks} ranks, {s.world_size}")
@pytest.mark.parametrize("layout", [*(layout.spec for layout in LAYOUTS[:4]), Balanced.name])
def test_fuzz(pool: Pool, request: pytest.FixtureRequest, layout: str, setting: Setting) -> None:
    wanted, seed = request.config.option.fuzz_cases, request.config.option.fuzz_seed
    # Shards of unequal lengths are no DTensors.
    with_turns = setting.num_ranks == setting.world_size
    tried = different(cases(layout, setting.world_size, with_turns), wanted, seed)
    for start in range(0, wanted, BATCH_OF_CASES):
        batch = tried[start : start + BATCH_OF_CASES]
        answers = pool.run(setting.num_ranks, results_of, batch, setting, timeout=300)
        for case, by_rank in zip(batch, zip(*answers, strict=True), strict=True):
            check(case, by_rank, setting)
    num_sliced = sum(case.ring.slices is not None for case in tried)
    request.node.user_properties.append(("different attentions tried", len(tried)))
    request.node.user_properties.append(("of them with slices", num_sliced))


@pytest.mark.parametrize("world_size", [6, 8])
def test_fuzz_of_threads(request: pytest.FixtureRequest, world_size: int) -> None:
    """More ranks than processes would have cores for, a quarter as often."""
    wanted, seed = request.config.option.fuzz_cases, request.config.option.fuzz_seed
    setting = Setting(world_size, world_size)
    for case in different(cases("zigzag", world_size, True), -(-wanted // 4), seed):
        check(case, tuple(played_results(case, setting)), setting)


def check(case: Case, by_rank: tuple[list[Tensor], ...], setting: Setting) -> None:
    """Compare each rank's part of the results with that of the dense ones."""
    for rank, results in enumerate(by_rank):
        check_rank(case, results, setting, rank)


def check_rank(case: Case, results: list[Tensor], setting: Setting, rank: int) -> None:
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    for name, actual, whole in zip(names[: len(results)], results, case.expected(), strict=True):
        part = setting.part_of(whole, case, rank, of_keys=name in ("dk", "dv"))
        assert actual.shape == part.shape, (case, rank, name)
        difference = (actual.double() - part).abs().masked_fill(actual == part, 0.0)
        error = difference.nan_to_num(torch.inf).max() if actual.numel() else 0.0
        largest = whole.abs().nan_to_num(posinf=0.0).max()
        assert error <= TOLERANCES[case.dtype] * (1 + largest), (case, rank, name, error)


def results_of(batch: list[Case], setting: Setting) -> list[list[Tensor]]:
    """By case: out, lse and all gradients, this rank's part of them."""
    with patch.object(quantised_rotation, "BLOCK_SIZE", SMALL):
        if setting.num_ranks == setting.world_size:
            return [plain_results(case, setting) for case in batch]
        # One mesh for all: DTensor takes equal meshes for one, but their groups are not.
        shape = setting.num_ranks // setting.world_size, setting.world_size
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        return [mesh_results(case, setting, mesh) for case in batch]


def plain_results(case: Case, setting: Setting) -> list[Tensor]:
    """Of this rank, from its shards; the gradient of sinks is that of all ranks."""
    results = _results(case, setting, partial(_attend, case, None), dist.get_rank())
    if case.sinks:
        dist.all_reduce(results[-1])
        results[-1] /= num_copies(case)
    return results


def played_results(case: Case, setting: Setting) -> list[list[Tensor]]:
    """Of all ranks, which are threads."""

    def run(group: PlayedGroup) -> list[Tensor]:
        return _results(case, setting, partial(_attend, case, group.group_name), group.rank())

    results = play_group(setting.world_size, run)
    if case.sinks:
        total = torch.stack([of_rank[-1] for of_rank in results]).sum(0) / num_copies(case)
        results = [[*of_rank[:-1], total] for of_rank in results]
    return results


def num_copies(case: Case) -> int:
    """How many ranks have the same tokens, and all heads: those of a group, by the op alone."""
    return 1 if case.trades else as_strategy(case.ring.strategy, case.ring.world_size).heads


def _attend(
    case: Case, group_name: str | None, query: Tensor, key: Tensor, value: Tensor, sinks: Any = None
) -> Any:
    """`(out, lse)` of a rank's shards, by the op, with exchanges around it where heads suffice."""
    call = case.call(sinks, group_name)
    if case.trades:
        return ulysses_attention(query, key, value, call)
    return ring_op(query, key, value, *flatten(call))


def mesh_results(case: Case, setting: Setting, mesh: DeviceMesh) -> list[Tensor]:
    """Of this rank, from DTensors over a mesh of replicas and of a ring, `("dp", "cp")`."""
    return _results(case, setting, partial(_attend_on_mesh, case, mesh), dist.get_rank())


def _results(case: Case, setting: Setting, attend: Callable[..., Any], rank: int) -> list[Tensor]:
    part_of = partial(setting.part_of, case=case, rank=rank)
    query, *others = case.inputs()
    shards = [part_of(query), *(part_of(x, of_keys=True) for x in others)]
    shards = [x.detach().requires_grad_() for x in shards]
    outputs = attend(*shards)
    used = outputs if case.grad_lse else outputs[:1]
    grads = [part_of(x) for x in case.grads()]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(used, shards, grads))]


def _attend_on_mesh(case: Case, mesh: DeviceMesh, *shards: Tensor) -> list[Tensor]:
    """`(out, lse)` of this rank, from DTensors over a mesh of two rings."""
    ring = case.ring
    annotation_of(mesh["cp"].get_group()).config = None  # each case has an axis of its own
    SequenceAxis(mesh["cp"], ring.layout, strategy=ring.strategy, policy=case.policy)
    places: list[Placement] = [Shard(0) if case.batch % 2 == 0 else Replicate(), Shard(2)]
    wholes = [local(x, torch.arange(x.shape[2])) for x in case.inputs()[:3]]
    tensors = [
        DTensor.from_local(shard, mesh, places, shape=whole.shape, stride=whole.stride())
        for shard, whole in zip(shards[:3], wholes, strict=True)
    ]
    sinks = [DTensor.from_local(x, mesh, [Replicate(), Replicate()]) for x in shards[3:]]
    tensors[0], bias = tensors[0].tensor_split([case.head_dims[0]], -1)
    options: dict[str, Any] = {
        "cu_seqlens": ring.cu_seqlens(),
        "key_cu_seqlens": ring.cu_seqlens(of_keys=True),
    }
    options["slices"] = ring.slices
    if isinstance(ring.layout, Balanced):
        options["runs"] = sequence_runs(ring.layout)
    outputs = ring_attention(
        *tensors,
        mask=ring.mask if ring.slices is None else None,
        sinks=sinks[0] if sinks else None,
        relative_bias=bias if case.extent else None,
        scale=case.scale,
        softcap=case.softcap,
        kernel=case.kernel,
        return_lse=True,
        **options,
    )
    shape = case.batch, case.heads[0], ring.seq_len
    assert [x.shape for x in outputs] == [(*shape, case.head_dims[1]), shape]
    assert all(list(x.placements) == places for x in outputs)
    return [x.to_local() for x in outputs]
