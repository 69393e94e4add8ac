"""Bytes of a simulated step, beside what `estimate` counts in a run on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtensor_ring.command.main import main
from dtensor_ring.simulate.training.layer_seconds import Shard, itemsize
from dtensor_ring.simulate.training.model_shape import ModelShape
from dtensor_ring.simulate.training.step_memory import StepMemory, step_memory
from parallel_plans.models import load

CONFIG = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "head_dim": 64}
CONFIG |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
CONFIG |= {"vocab_size": 4096, "tie_word_embeddings": False}
SEQ_LEN, CP, DP = 4096, 2, 2


def _estimated(
    dtype: str, checkpoint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG))
    command = f"estimate --model {path} --seq-len {SEQ_LEN} --mesh cp={CP},dp_shard={DP} --json"
    assert main(load, [*command.split(), "--dtype", dtype, "--checkpoint", checkpoint]) == 0
    return json.loads(capsys.readouterr().out)


def _simulated(dtype: str, checkpoint: str, tp: int = 1, held: int = 0) -> StepMemory:
    shard = Shard(SEQ_LEN // CP, tp, itemsize(dtype), dtype)
    return step_memory(ModelShape.of(CONFIG), shard, CP * DP, checkpoint, held)


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
    # Parameters of a simulated step are float32.
    wide = 4 // itemsize(dtype)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(found, name) == pytest.approx(wide * counted[name], rel=0.002)


def test_what_checkpoints_keep() -> None:
    nothing, attention, full = (_simulated("bfloat16", x) for x in ("none", "attention", "full"))
    tokens, layers = SEQ_LEN // CP, 4
    assert full.attention_kept == 0
    # An output of 8 heads of 64 numbers and an lse of each head.
    assert attention.attention_kept == layers * tokens * (8 * 64 * 2 + 8 * 4)
    last = tokens * (512 * 8 + 2 * 64 * 2)  # the last norm, and rotary tables
    assert attention.others_kept == full.others_kept == layers * tokens * 512 * 2 + last
    kept = nothing.attention_kept + nothing.others_kept - last
    assert attention.working == full.working == kept // layers
    assert nothing.working == 0


def test_tensor_parallelism_divides() -> None:
    whole, half = _simulated("bfloat16", "none"), _simulated("bfloat16", "none", tp=2)
    for name in ("parameters", "gradients", "optimizer", "gathered", "attention_kept"):
        assert getattr(half, name) * 2 == getattr(whole, name), name
    # Outputs of the nine norms are gathered, and rotary tables are for all tokens.
    gathered = SEQ_LEN // CP * (9 * 512 + 2 * 64) * 2
    assert (half.others_kept - gathered) * 2 == whole.others_kept - gathered
    assert half.peak == sum(half)


def test_what_an_attention_holds_is_added() -> None:
    assert _simulated("bfloat16", "full", held=100).working == (
        100 + _simulated("bfloat16", "full").working
    )


def test_one_rank_gathers_nothing() -> None:
    shard = Shard(SEQ_LEN, 1, 2, "bfloat16")
    assert step_memory(ModelShape.of(CONFIG), shard, 1, "none", 0).gathered == 0
