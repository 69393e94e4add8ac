"""Meshes of simulated steps: their axes, and what they divide."""

from __future__ import annotations

from typing import Any

import pytest

from dtensor_ring.lab.training.collectives import RankGroup
from dtensor_ring.lab.training.model_shape import ModelShape
from dtensor_ring.lab.training.step_request import StepMesh
from tests.lab.machines import round_machine

CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 32}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}


def test_axes() -> None:
    mesh = StepMesh.of({"dp": 2, "cp": 4, "tp": 2})
    assert mesh == StepMesh(1, 2, 4, 2) == StepMesh.of({"dp_shard": 2, "cp": 4, "tp": 2}, 16)
    machine = round_machine(ranks_per_host=8)
    assert mesh.shards(machine) == RankGroup(8, 4)  # every second rank, of two hosts
    assert mesh.replicas(machine).ranks == 1
    assert StepMesh(4, 1, 2, 2).replicas(machine) == RankGroup(4, 2)


@pytest.mark.parametrize(
    ("axes", "world_size", "message"),
    [
        ({"pp": 2}, None, "a mesh has axes of dp_replicate, dp_shard, cp, tp and dp"),
        ({"dp": 2, "dp_shard": 2}, None, "each once; got dp, dp_shard"),
        ({"cp": 0}, None, "cp of mesh must be from 1 to 4,096, got 0"),
        ({"dp": 2**20}, None, "dp_shard of mesh must be from 1 to 65,536, got 1048576"),
        ({"dp": 2, "cp": 4}, 16, "mesh dp 2 x cp 4 has 8 ranks, and world_size is 16"),
    ],
)
def test_bad_axes(axes: dict[str, Any], world_size: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepMesh.of(axes, world_size)


@pytest.mark.parametrize(
    ("mesh", "seq_len", "message"),
    [
        (StepMesh(tp=16), 64, "8 heads of llama cannot be divided over the 16 ranks of tp"),
        (StepMesh(tp=8), 64, "4 key heads of llama cannot be divided over the 8 ranks of tp"),
        (StepMesh(cp=5), 64, "64 tokens cannot be divided over the 5 ranks of cp"),
    ],
)
def test_what_does_not_divide(mesh: StepMesh, seq_len: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh.check(ModelShape.of(CONFIG), seq_len)


def test_inner_sizes_divide() -> None:
    odd = ModelShape.of(CONFIG | {"intermediate_size": 98})
    with pytest.raises(
        ValueError, match="intermediate_size of llama is 98, which cannot be divided over the 4"
    ):
        StepMesh(tp=4).check(odd, 64)
    StepMesh(tp=2, cp=4).check(odd, 64)
