"""Bytes of a step, as they are simulated, counted on the meta device and allocated."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import simulate_step
from dtensor_ring.command.main import main
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training.layer_seconds import Shard, itemsize
from dtensor_ring.lab.training.model_shape import ModelShape
from dtensor_ring.lab.training.step_memory import AttentionRoom, StepMemory, step_memory
from dtensor_ring.lab.training.step_request import MemorySetting
from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.models import load
from tests.families import COMPRESSED, VOCABULARY, small_model
from tests.lab.test_recorded import counted
from tests.pool import Pool

CONFIG = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "head_dim": 64}
CONFIG |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
CONFIG |= {"vocab_size": 4096, "tie_word_embeddings": False}
SEQ_LEN, CP, DP = 4096, 2, 2


def _estimated(
    dtype: str, checkpoint: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, Any]:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG))
    command = f"estimate --model {path} --seq-len {SEQ_LEN} --mesh cp={CP},dp_shard={DP} --json"
    asked = [*command.split(), "--dtype", dtype, "--checkpoint", checkpoint, *options]
    assert main(load, asked) == 0
    return json.loads(capsys.readouterr().out)


def _simulated(
    dtype: str, checkpoint: str, *, tp: int = 1, backward: int = 0, **setting: Any
) -> StepMemory:
    shard = Shard(SEQ_LEN // CP, tp, itemsize(dtype), dtype)
    rooms = [AttentionRoom(0, 0, backward)] * 4
    how = MemorySetting(checkpoint, **setting)
    return step_memory(ModelShape.of(CONFIG), shard, CP * DP, how, rooms)


@pytest.mark.parametrize(
    ("dtype", "checkpoint"),
    [
        ("bfloat16", "none"),
        pytest.param("float32", "none", marks=pytest.mark.repeats),
        pytest.param("float32", "full", marks=pytest.mark.repeats),
    ],
)
def test_bytes_are_those_of_a_run(
    dtype: str, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left out, such as weights of norms, is less than 1 %."""
    counted, found = _estimated(dtype, checkpoint, tmp_path, capsys), _simulated(dtype, checkpoint)
    assert found.attention_kept == counted["attention_kept"]
    assert found.others_kept == pytest.approx(counted["others_kept"], rel=0.01)
    assert found.gathered == pytest.approx(counted["gathered"], rel=0.001)
    for name in ("parameters", "optimizer"):
        assert getattr(found, name) == pytest.approx(counted[name], rel=0.002)


@pytest.mark.parametrize(
    ("checkpoint", "offload"),
    [
        ("none", []),
        ("attention", []),
        ("full", []),
        ("full", ["optimizer"]),
        ("attention", ["checkpoints"]),
    ],
)
def test_both_commands_have_one_peak(
    checkpoint: str, offload: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for what the loss has inside, and kernels of a GPU, which the run that `estimate` counts
    does not see: so it is simulated on a machine whose kernels have nothing inside."""
    far = [x for name in offload for x in ("--offload", name)]
    counted = _estimated("bfloat16", checkpoint, tmp_path, capsys, *far)
    asked = CONFIG, SEQ_LEN, {"cp": CP, "dp_shard": DP}
    machine = replace(as_machine("h100"), host_waits=True)
    found = simulate_step(*asked, machine, checkpoint=checkpoint, offload=offload).memory
    assert counted["peak"] == pytest.approx(found["peak"], rel=0.05)


TOKENS, ROOM = SEQ_LEN // CP, 10**12
STREAM = TOKENS * 512 * 2
QUERIES, KEYS = TOKENS * 8 * 64 * 2, TOKENS * 2 * 64 * 2
RESULTS = QUERIES + TOKENS * 8 * 4  # the output, and an lse of each head
NORM = TOKENS * 512 * (4 + 2 + 2)  # in float32, over its norm, and the output
TABLES = 2 * TOKENS * 64 * 2  # of rotary embeddings
MLP = 4 * TOKENS * 1408 * 2
LAYER = 2 * NORM + 2 * TOKENS * 4 + QUERIES + 2 * KEYS + RESULTS + MLP
# With two gradients, and that of the head, which waits for the embedding's.
ATTENDING = NORM + QUERIES + 2 * KEYS + RESULTS + STREAM + QUERIES + ROOM + 4096 * 512 * 2
LOSS = NORM + 2 * TOKENS * 4  # the norm before it, and a sum for each token


@pytest.mark.parametrize(
    ("setting", "kept", "fullest"),
    [
        ({"checkpoint": "none"}, 4 * LAYER, 3 * LAYER + ATTENDING),
        (
            {"checkpoint": "attention"},
            4 * (STREAM + RESULTS),
            3 * (STREAM + RESULTS) + STREAM + ATTENDING,
        ),
        # That of the first layer's: gradients of the others are more than their inputs.
        ({"checkpoint": "full"}, 4 * STREAM, STREAM + ATTENDING),
        # What layers keep is on the host, but for this layer and three tensors.
        ({"checkpoint": "full", "offload": ("checkpoints",)}, 4 * STREAM, 4 * STREAM + ATTENDING),
        (
            {"checkpoint": "attention", "offload": ("checkpoints",)},
            2 * (STREAM + RESULTS),
            2 * STREAM + RESULTS + ATTENDING,
        ),
    ],
)
def test_the_fullest_moment(setting: dict[str, Any], kept: int, fullest: int) -> None:
    """Where an attention needs most, the backward of the last layer's, or as is said."""
    found = _simulated("bfloat16", backward=ROOM, **setting)
    assert found.attention_kept + found.others_kept == kept + LOSS + TABLES
    # Besides: the mean of squares of norms.
    assert found.working == pytest.approx(fullest - kept - LOSS, abs=16 * TOKENS)
    is_last = setting["checkpoint"] != "full" and "offload" not in setting
    assert is_last == (found.gradients == 0)
    if "offload" in setting:
        assert found.host == (4 * STREAM if setting["checkpoint"] == "full" else 2 * kept)


def test_tiles_keep_inputs_and_outputs() -> None:
    """Of norms: input and output. Of an MLP: nothing but its input, the output of a norm."""
    found = _simulated("bfloat16", "none", mlp_tile=1)
    layer = 4 * STREAM + QUERIES + 2 * KEYS + RESULTS
    head = 2 * STREAM + TOKENS * 4
    assert found.attention_kept + found.others_kept == 4 * layer + head + TABLES
    large = [_simulated("bfloat16", "full", mlp_tile=x) for x in (TOKENS // 2, TOKENS, 2 * TOKENS)]
    assert large[0].peak < large[1].peak == large[2].peak


def test_states_on_the_host() -> None:
    here, there = (_simulated("bfloat16", "none", offload=x) for x in ((), ("optimizer",)))
    states = 2 * here.parameters + here.optimizer
    assert (there.parameters, there.gradients, there.optimizer, there.host) == (0, 0, 0, states)
    assert here.peak - there.peak == here.parameters + here.gradients + here.optimizer


def test_tensor_parallelism_divides() -> None:
    whole, half = _simulated("bfloat16", "none"), _simulated("bfloat16", "none", tp=2)
    assert half.attention_kept * 2 == whole.attention_kept
    for name in ("parameters", "gradients", "optimizer", "gathered"):
        # Each rank has all weights of norms.
        assert getattr(half, name) * 2 == pytest.approx(getattr(whole, name), rel=1e-3), name
    # Outputs of the nine norms are gathered, and rotary tables are for all tokens.
    gathered = SEQ_LEN // CP * ((9 * 512 + 2 * 64) * 2 + 4)
    assert (half.others_kept - gathered) * 2 == whole.others_kept - gathered
    assert half.peak == sum(half)


def test_one_rank_gathers_what_is_cast() -> None:
    model, rooms = ModelShape.of(CONFIG), [AttentionRoom()] * 4
    for dtype in ("float32", "bfloat16"):
        shard = Shard(SEQ_LEN, 1, itemsize(dtype), dtype)
        found = step_memory(model, shard, 1, MemorySetting(), rooms)
        assert bool(found.gathered) == (dtype == "bfloat16")


def test_gradients_come_with_the_backward_of_layers() -> None:
    """A step of few tokens is fullest in the update, one of many in its last layer."""
    model, rooms = ModelShape.of(CONFIG), [AttentionRoom()] * 4
    found = [
        step_memory(model, Shard(tokens, 1, 4, "float32"), 1, MemorySetting(), rooms).gradients
        for tokens in (16, 1024, 65536)
    ]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (model.weights * 4, 0)


# What `estimate` says of a model that chooses its keys, next to a real step on two ranks.

CHOSEN_LEN, TOPK = 48, 32
"""Few queries of a rank choose all keys that it sees, and no query chooses nearly all."""

LOSS_MESSAGES = {"sent": 8, "received": 8, "messages": 2}
"""A float32 to the other rank, and its gradient, which no transport of keys counts."""


OTHERS: dict[str, dict[str, Any]] = {
    "MiniMax M3": {"index_topk_blocks": 8, "index_block_size": TOPK // 8},
    "DeepSeek-V4": {"index_topk": 10, "compress_rates": dict(zip(COMPRESSED, (4, 8), strict=True))},
    "Qwen4-Exp": {"indexer_budget": 30},
}
"""These choose blocks or pools, whose numbers are not in the config of the others."""


WITH_POOLS = "DeepSeek-V4", "Qwen4-Exp"


def _model(family: str) -> Any:
    return small_model(family, **OTHERS.get(family, {"index_topk": TOPK}))


def _step(family: str) -> dict[str, int]:
    """Messages of a rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = _model(family)
    model = parallelize_module(model, mesh, context_parallel_plan(model, "zigzag"))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (1, CHOSEN_LEN), generator=generator)

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    return asdict(counted(step)[1])


@pytest.mark.parametrize(
    ("family", "kinds", "chosen"),
    [
        ("DeepSeek-V3.2", {3}, {TOPK}),
        pytest.param("GLM-5", {3}, {TOPK}, marks=pytest.mark.repeats),
        ("MiniMax M3", {1, 2}, {TOPK, None}),
        ("DeepSeek-V4", {1, 3}, {10, None}),
        pytest.param("Qwen4-Exp", {1}, {TOPK}, marks=pytest.mark.repeats),
    ],
)
def test_messages_are_those_of_a_step(
    pool: Pool,
    family: str,
    kinds: set[int],
    chosen: set[int | None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of index keys, requests, latents and gradients; layers that share an index send it once.

    MiniMax M3 has keys and values in place of latents, and a layer without an index. DeepSeek-V4
    attends to a window in each layer, and beside it to pools: those that are chosen, or all.
    """
    path = tmp_path / "config.json"
    path.write_text(_model(family).config.to_json_string(use_diff=False))
    command = ["estimate", "--model", str(path), "--seq-len", str(CHOSEN_LEN), "--mesh", "cp=2"]
    command += ["--dtype", "float32"]
    assert main(load, [*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    *_, last = pool.run(2, _step, family)
    for name, of_loss in LOSS_MESSAGES.items():
        assert found["messages"][name] == last[name] + of_loss, name
    assert {x["calls"] for x in found["attentions"]} == kinds
    assert {x["chosen"] for x in found["attentions"]} == chosen
    assert found["attention_working"] > 0
    assert main(load, [*command, "--json", "--checkpoint", "attention"]) == 0
    checkpointed = json.loads(capsys.readouterr().out)
    if family not in WITH_POOLS:  # tokens of pools that are cut travel again
        assert checkpointed["messages"] == found["messages"], "what attentions return is kept"
    assert 0 < checkpointed["attention_kept"] < found["attention_kept"]
    assert main(load, command) == 0
    assert f"{min(x for x in chosen if x)} keys" in capsys.readouterr().out
