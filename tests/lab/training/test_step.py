"""Simulated training steps: their parts, meshes and sweeps, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtensor_ring import Mask
from dtensor_ring.lab.machine import Curve, Machine
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.simulated_attention import simulate_attention
from dtensor_ring.lab.training.collectives import COLLECTIVE, COMPUTE, RankGroup
from dtensor_ring.lab.training.model_shape import ModelShape
from dtensor_ring.lab.training.step import SimulatedStep, simulate_step
from dtensor_ring.lab.training.step_request import StepMesh
from dtensor_ring.lab.training.step_sweep import (
    link_rate,
    parse_sweep,
    sweep_steps,
    winner_map,
    with_rate,
)
from dtensor_ring.planning.layout import ZigZag
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.strategy import every_strategy
from tests.lab.machines import links, round_machine

LLAMA = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "head_dim": 64}
LLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4}
LLAMA |= {"vocab_size": 4096}
GEMMA = LLAMA | {"model_type": "gemma3_text", "sliding_window": 512, "tie_word_embeddings": False}
GEMMA |= {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
SEQ_LEN = 8192
H100 = as_machine("h100")


def _step(
    config: Any = LLAMA, mesh: dict[str, int] | None = None, machine: Machine = H100, **options: Any
) -> SimulatedStep:
    return simulate_step(config, SEQ_LEN, mesh or {"dp": 2, "cp": 4}, machine, **options)


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        (LLAMA, {"dp": 2, "cp": 4, "tp": 2}, {"checkpoint": "full"}),
        (GEMMA, {"cp": 8}, {"strategy": "ulysses:2", "checkpoint": "attention"}),
        (LLAMA | EXPERTS | {"model_type": "qwen3_moe"}, {"dp_replicate": 2, "cp": 2}, {}),
        (LLAMA, {"cp": 1}, {"dtype": "float8_e4m3fn"}),
    ],
)
def test_parts_add_up(config: Any, mesh: dict[str, int], options: Any) -> None:
    step = _step(config, mesh, **options)
    end = max(span.end for span in step.spans)
    assert step.seconds == pytest.approx(end + step.parts["optimizer"])
    # Kernels run one after the other; what is left of the step is waiting for FSDP2.
    kernels = sum(x.end - x.begin for x in step.spans if x.stream == COMPUTE)
    assert kernels <= end
    busy = step.parts["fsdp"] + sum(
        step.parts[x] for x in ("attention", "gemm", "others", "ring", "tp", "loss")
    )
    assert busy == pytest.approx(end)
    assert all(seconds >= 0 for seconds in step.parts.values())
    assert step.memory["peak"] == sum(x for name, x in step.memory.items() if name != "peak")


def test_attention_is_that_of_its_layers() -> None:
    """Two layers with a window and one without, each with half of the heads of a rank."""
    step = _step(GEMMA, {"cp": 4, "tp": 2})
    machine = replace(H100, ranks_per_host=4)
    seconds = 0.0
    for mask, layers in ((Mask.sliding(511), 2), (Mask.causal(), 1)):
        found = simulate_attention(mask, SEQ_LEN, 4, (8, 2), 64, machine=machine)
        seconds += layers * found.total
    assert step.parts["attention"] + step.parts["ring"] == pytest.approx(seconds)


def test_checkpoints_compute_again() -> None:
    nothing, attention, full = (_step(checkpoint=x).parts for x in ("none", "attention", "full"))
    for part in ("gemm", "tp"):
        assert attention[part] == pytest.approx(4 / 3 * nothing[part]), part
        assert full[part] == attention[part]
    assert attention["attention"] == nothing["attention"]
    (found,) = _step().attentions.values()
    for part, again in (("attention", found.forward), ("ring", found.forward_waits)):
        assert full[part] == pytest.approx(nothing[part] + 3 * again), part
    assert nothing["loss"] == full["loss"]


def test_flops() -> None:
    tokens, ranks = SEQ_LEN, 8
    step = _step(GEMMA, {"cp": 4, "tp": 2})
    weights = 3 * (1024 * (16 + 8) * 64 + 1024 * 1024 + 3 * 1024 * 2816) + 1024 * 4096
    causal, window = (
        sum(x.area for x in plan(ZigZag(), mask, 0, 1, tokens).steps[0].tiles)
        for mask in (Mask.causal(), Mask.sliding(511))
    )
    assert causal == tokens * (tokens + 1) // 2
    visible = 12 * 16 * 64 * (causal + 2 * window)
    assert step.flops == (6 * weights * tokens + visible) / ranks
    assert step.flops_of_all_pairs == (6 * weights * tokens + 12 * 1024 * 3 * tokens**2) / ranks
    assert step.mfu == pytest.approx(step.flops / step.seconds / 989e12)
    assert step.tokens_per_second == pytest.approx(tokens / ranks / step.seconds)


def _faster(curve: Curve) -> Curve:
    return Curve(curve.sizes, tuple(x / 2 for x in curve.seconds))


FASTER = {
    "gemm": {"gemm": {name: 2 * x for name, x in H100.gemm.items()}},
    "memory": {"memory_rate": 2 * H100.memory_rate},
    "inside": {"inside": links(0.0, 1e15)},
    "between": {"between": links(0.0, 1e15)},
    "kernels": {
        "kernels": tuple(
            replace(x, forward=_faster(x.forward), backward=_faster(x.backward))
            for x in H100.kernels
        )
    },
}


@pytest.mark.parametrize(
    ("what", "strategy"),
    [*((x, "ring") for x in FASTER), ("between", "all_gather"), ("inside", "ulysses:4")],
)
def test_a_faster_machine_is_never_slower(what: str, strategy: str) -> None:
    asked: Any = {"config": LLAMA, "seq_len": 131072, "mesh": {"dp": 2, "cp": 8, "tp": 2}}
    before = simulate_step(**asked, strategy=strategy)
    machine = replace(H100, **FASTER[what])
    after = simulate_step(**asked, strategy=strategy, machine=machine)
    assert after.seconds < before.seconds
    assert after.memory == before.memory


def test_data_parallel_groups_are_simulated_once() -> None:
    short = [*range(0, SEQ_LEN + 1, 1024)]
    whole, packed = [0, SEQ_LEN], short
    slow, fast, mixed = (_step(batches=x) for x in ([whole] * 2, [packed] * 2, [packed, whole]))
    assert fast.parts["attention"] < slow.parts["attention"]
    assert mixed.parts == slow.parts  # the slowest decides
    assert mixed.flops == pytest.approx((slow.flops + fast.flops) / 2)
    # Whole sequences are one document.
    assert slow.parts == pytest.approx(_step().parts)


def test_rows_of_boundaries_are_a_batch() -> None:
    rows = [[0, SEQ_LEN, SEQ_LEN], [0, 1024, SEQ_LEN]]
    step, expected = _step(batches=[rows] * 2), _step(batch=2)
    assert step.parts["gemm"] == expected.parts["gemm"]
    hidden = 12 * 16 * 64 * 3 * 1024 * (SEQ_LEN - 1024)
    assert step.flops == expected.flops - hidden / 4
    assert step.memory["others_kept"] == expected.memory["others_kept"]


def test_auto_is_the_fastest() -> None:
    for tokens in (2048, 32768):
        of = {"config": GEMMA, "seq_len": tokens, "mesh": {"cp": 8}, "machine": H100}
        auto = simulate_step(**of, strategy="auto")
        every = ("ring", "all_gather", "ulysses:2", "ulysses:4", "ulysses:8")
        for name, found in auto.attentions.items():
            best = min(simulate_step(**of, strategy=x).attentions[name].total for x in every)
            assert found.total <= best * (1 + 1e-6)
            assert f"strategy of {name}" in str(auto)


def test_collectives_are_those_of_fsdp2() -> None:
    """Alone, a rank has none. With replicas only, gradients are reduced and nothing is gathered."""
    assert not [x for x in _step(mesh={"tp": 2}).spans if x.stream == COLLECTIVE]
    replicas = _step(mesh={"dp_replicate": 4}).spans
    labels = {x.label.split()[0] for x in replicas if x.stream == COLLECTIVE}
    assert labels == {"reduce"}
    shards = [x.label for x in _step(mesh={"dp": 4}).spans if x.stream == COLLECTIVE]
    # Embedding, three layers and head; the head is not gathered again.
    assert len([x for x in shards if x.startswith("gather")]) == 5 + 4
    assert len([x for x in shards if x.startswith("reduce")]) == 5


def test_memory_that_a_device_lacks() -> None:
    step = _step(machine=replace(H100, memory=2**28))
    assert step.why_not is not None
    assert "and a device has 0.2" in step.why_not
    assert "does not fit" in str(step)
    assert _step().why_not is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"cp": 3}}, "8192 tokens cannot be divided over the 3 ranks of cp"),
        ({"mesh": {"cp": 2}, "world_size": 4}, "mesh cp 2 has 2 ranks, and world_size is 4"),
        ({"strategy": "ulysses:3"}, "do not divide the 4"),
        ({"mesh": {"cp": 32}, "strategy": "ulysses"}, "16 query heads cannot be sharded"),
        ({"strategy": "rings"}, "unknown strategy 'rings'"),
        ({"layout": "zag"}, "unknown layout 'zag'"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"dtype": "float32"}, "has no speed"),
        ({"checkpoint": "some"}, "checkpoint must be one of none, attention, full"),
        ({"kernel": "mine"}, "no speed of kernel mine"),
        ({"batch": 2**40}, "batch must be from 1 to"),
        ({"batches": [[0, SEQ_LEN]]}, "2 data-parallel groups need as many batches, got 1"),
        ({"batches": [[0, SEQ_LEN], [[0, 8, SEQ_LEN], [0, 9, SEQ_LEN]]]}, "equal numbers of rows"),
        ({"machine": "h1000"}, "machine 'h1000' is neither a file"),
        (
            {"config": {"hidden_size": 8}},
            "is taken for that of a Llama, which needs intermediate_size",
        ),
    ],
)
def test_what_cannot_be_simulated(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        _step(**options)
    assert "\n" not in str(error.value)


def test_json_has_what_the_table_has() -> None:
    step = _step(strategy="ulysses:2")
    found = step.as_json()
    assert found["seconds"] == step.seconds == pytest.approx(sum(found["parts"].values()))
    assert found["mfu_of_all_pairs"] > found["mfu"] == step.mfu
    ((name, attention),) = found["attentions"].items()
    assert name == "right 0, 16 heads"
    assert attention["strategy"] == "ulysses:2"
    for text in (f"{step.seconds * 1e3:,.1f} ms", f"{step.mfu:.1%}", "dp_shard 2 x cp 4"):
        assert text in str(step)


def test_what_fsdp2_copies_and_updates() -> None:
    """Weights are copied from what was gathered, twice; gradients are cast to float32, once."""
    alone, shards = (_step(mesh={"cp": 1, "dp": x}) for x in (1, 4))
    layer = 1024 * (16 + 8) * 64 + 1024 * 1024 + 3 * 1024 * 2816 + 2 * 1024
    copied = 3 * layer * (2 * (2 + 2) + (2 + 4)) / H100.memory_rate
    assert shards.parts["others"] - alone.parts["others"] == pytest.approx(copied)
    weights = 3 * layer + 2 * 1024 * 4096
    for step, ranks in ((alone, 1), (shards, 4)):
        assert step.memory["parameters"] == 4 * weights // ranks
        assert step.parts["optimizer"] == pytest.approx(28 * weights / ranks / H100.memory_rate)


def test_a_tied_projection_is_gathered_with_the_embedding() -> None:
    spans = _step(LLAMA | {"tie_word_embeddings": True}, {"dp": 4}).spans
    collectives = [x.label for x in spans if x.stream == COLLECTIVE]
    assert not [x for x in collectives if x.endswith("head")]
    assert [x for x in collectives if x.endswith("embedding")] == [
        "gather embedding", "gather embedding", "reduce embedding",
    ]  # fmt: skip


def test_collectives_take_what_their_bytes_take() -> None:
    """On four ranks of a host: three of four parts travel, in bfloat16 and in float32."""
    step = _step(mesh={"dp": 2, "cp": 2}, machine=replace(H100, beside_kernel=1.0))
    layer = 1024 * (16 + 8) * 64 + 1024 * 1024 + 3 * 1024 * 2816 + 2 * 1024
    expected = {
        "gather layer": H100.inside.all_gather(2 * layer * 3 / 4),
        "reduce layer": H100.inside.reduce_scatter(4 * layer * 3 / 4),
    }
    for label, seconds in expected.items():
        found = [x.end - x.begin for x in step.spans if x.label == label]
        assert found == pytest.approx([seconds] * len(found)), label
        assert len(found) >= 3


# Meshes of simulated steps: their axes, and what they divide.

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


# Sweeps of simulated steps, and which strategy wins where.

SWEPT = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096}
SWEPT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ASKED: dict[str, Any] = {"config": SWEPT, "seq_len": 16384, "mesh": {"cp": 8}, "machine": "h100"}


def test_ranks_stay_and_dp_takes_the_rest() -> None:
    rows = sweep_steps({"cp": [1, 2, 4, 8, 3]}, **ASKED).rows
    for row, dp in zip(rows, (8, 4, 2, 1), strict=False):
        cp = row.values["cp"]
        expected = simulate_step(**(ASKED | {"mesh": {"dp": dp, "cp": cp}}))
        assert row.step is not None
        assert row.step.as_json() == expected.as_json()
    assert rows[4].step is None
    assert rows[4].why_not == "3 ranks of the other axes do not divide 8"


def test_all_strategies() -> None:
    found = sweep_steps({"strategy": ["all"], "cp": [1, 8]}, **ASKED)
    specs = [row.values["strategy"] for row in found.rows]
    assert specs == ["ring", *(x.spec for x in every_strategy(8))]
    lines = str(found).splitlines()
    assert lines[0].split() == ["strategy", "cp", "ms", "MFU", "tokens/s", "waits,", "ms", "GiB"]
    assert len(lines) == len(specs) + 1
    for line, row in zip(lines[1:], found.rows, strict=True):
        if row.why_not is None:
            assert row.step is not None
            assert f"{row.step.seconds * 1e3:,.1f}" in line
    assert lines[-1].endswith(
        "4 query heads cannot be sharded over the 8 ranks of a group, each has to get one"
    )


def test_machines_and_sizes() -> None:
    rows = sweep_steps({"machine": ["h100", "b200"], "batch": [1, 2]}, **ASKED).rows
    steps = [row.step for row in rows]
    assert [x.machine for x in steps if x] == ["h100", "h100", "b200", "b200"]
    seconds = [x.seconds for x in steps if x]
    assert seconds[2] < seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (["pp=2"], "'pp=2' cannot be swept: cp=1,2,4 or one of dp_replicate"),
        (["cp"], "'cp' cannot be swept"),
        (["cp=1", "cp=2"], "'cp=2' cannot be swept"),
        (["cp=1,x"], "cp=x is not a number"),
    ],
)
def test_what_cannot_be_swept(text: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sweep(text)


def test_links_of_another_speed() -> None:
    assert link_rate(H100.between) == pytest.approx(48e9, rel=1e-3)
    slower = with_rate(H100.inside, link_rate(H100.inside) / 4)
    for name in ("p2p", "all_to_all", "all_gather", "reduce_scatter"):
        before, after = getattr(H100.inside, name), getattr(slower, name)
        assert after(0.0) == before(0.0)
        assert after(2**28) - after(0.0) == pytest.approx(4 * (before(2**28) - before(0.0)))


def test_winners() -> None:
    """Each cell has the strategy of the shortest step, and how much shorter it is in attention."""
    tokens, rates = (1024, 16384), (10e9, 400e9)
    found = winner_map(SWEPT, {"cp": 4}, "h100", tokens, rates)
    assert found.level == "inside"
    assert found.strategies == tuple(x.spec for x in every_strategy(4))
    for count, winners, gains in zip(tokens, found.winners, found.gains, strict=True):
        for rate, winner, gain in zip(rates, winners, gains, strict=True):
            from dataclasses import replace

            machine = replace(H100, inside=with_rate(H100.inside, rate))
            seconds = []
            for strategy in found.strategies:
                step = simulate_step(SWEPT, 4 * count, {"cp": 4}, machine, strategy=strategy)
                seconds.append(sum(step.parts[x] for x in ("attention", "ring")))
            assert seconds[winner] == pytest.approx(min(seconds))
            assert gain == pytest.approx(seconds[0] / min(seconds))


def test_links_between_hosts_decide_across_them() -> None:
    found = winner_map(SWEPT, {"cp": 8, "tp": 2}, "h100", (1024,), (50e9,))
    assert found.level == "between"
    # Two query heads of a rank are too few for groups of four and eight.
    assert found.strategies[found.winners[0][0]] not in ("ulysses:4", "ulysses:8")


def test_without_an_axis_there_is_nothing_to_choose() -> None:
    with pytest.raises(ValueError, match="without cp in the mesh, there are no strategies"):
        winner_map(SWEPT, {"tp": 2}, "h100", (1024,), (50e9,))
