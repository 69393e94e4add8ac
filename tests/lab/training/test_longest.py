"""The longest sequence of a step: what reaches how far, and that nothing longer fits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from docs.long_table import LLAMA
from dtensor_ring import longest_sequences
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training.longest import SETTINGS, SPARE, UNIT
from dtensor_ring.lab.training.step import simulate_step
from dtensor_ring.lab.training.step_request import MemorySetting, memory_setting
from dtensor_ring.transport.transport import TransferPolicy

MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768}
MOE |= {"num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 4}
MOE |= {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
HYBRID = MOE | {"model_type": "qwen3_next", "linear_num_key_heads": 16, "linear_conv_kernel_dim": 4}
HYBRID |= {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
HYBRID |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3}
H100 = as_machine("h100")


def test_millions_of_tokens_of_an_8b_model() -> None:
    """What DeepSpeed's recipe reaches on 8 GPUs of 80 GB: arXiv 2506.13996, 3.7 million."""
    found = longest_sequences(LLAMA, {"cp": 8}, "h100", is_timed=False, settings=SETTINGS[-1:])
    assert found.memory == int(H100.memory * (1 - SPARE))
    assert max(row.seq_len for row in found.rows) >= 3_700_000


@pytest.mark.parametrize(
    ("config", "mesh"), [(MOE, {"cp": 4, "dp_shard": 2}), (HYBRID, {"cp": 4}), (LLAMA, {"cp": 1})]
)
def test_nothing_longer_fits(config: Any, mesh: dict[str, int]) -> None:
    """And each setting reaches as far as the one before: a third of them, and the last."""
    settings = [*SETTINGS[::3], SETTINGS[-1]]
    found = longest_sequences(config, mesh, is_timed=False, settings=settings)
    lengths = [row.seq_len for row in found.rows]
    assert lengths == sorted(lengths)
    assert all((row.memory.peak <= found.memory) == (row.seq_len > 0) for row in found.rows)
    for row in (found.rows[0], found.rows[-1]):
        if row.seq_len:
            longer = longest_sequences(
                *(config, mesh), is_timed=False, settings=[row.setting], memory=row.memory.peak - 1
            )
            unit = UNIT * mesh["cp"]
            assert longer.rows[0].seq_len == row.seq_len - unit


def test_memory_and_seconds_are_those_of_a_step() -> None:
    setting = MemorySetting("full", 4096, ("checkpoints",))
    (row,) = longest_sequences(LLAMA, {"cp": 8}, settings=[setting]).rows
    step = simulate_step(
        *(LLAMA, row.seq_len, {"cp": 8}), checkpoint="full", mlp_tile=4096, offload=["checkpoints"]
    )
    assert row.seconds == step.seconds
    ids = 24 * row.seq_len
    assert row.memory.peak == step.memory["peak"] + ids
    assert row.memory.host == step.memory["host"] == 32 * row.seq_len // 8 * 4096 * 2


def test_the_first_setting_that_reaches_a_length() -> None:
    lengths = [x.seq_len for x in longest_sequences(LLAMA, {"cp": 8}, is_timed=False).rows]
    for i in (0, 2, len(lengths) - 1):
        found = longest_sequences(LLAMA, {"cp": 8}, seq_len=lengths[i], is_timed=False)
        assert found.smallest is not None
        assert found.smallest.setting == SETTINGS[lengths.index(lengths[i])]
        assert found.smallest.seq_len == lengths[i]
        assert f"{lengths[i]:,} tokens are reached with: {found.smallest.setting}" in str(found)
    beyond = longest_sequences(LLAMA, {"cp": 8}, seq_len=2 * lengths[-1], is_timed=False)
    assert beyond.smallest is None
    assert "no setting reaches" in str(beyond)


def test_memory_that_holds_no_sequence() -> None:
    found = longest_sequences(LLAMA, {"cp": 8}, memory=2**30, settings=SETTINGS[::3])
    assert {row.seq_len for row in found.rows} == {0}
    assert all(row.seconds is None for row in found.rows)
    assert "does not fit" in str(found)


def test_layers_with_a_state_have_seconds() -> None:
    setting = MemorySetting("full")
    (row,) = longest_sequences(HYBRID, {"cp": 4}, settings=[setting]).rows
    assert row.seconds == simulate_step(HYBRID, row.seq_len, {"cp": 4}, checkpoint="full").seconds


def test_json_has_what_the_table_has() -> None:
    settings = SETTINGS[:1] + SETTINGS[-1:]
    found = longest_sequences(LLAMA, {"cp": 2}, seq_len=1024, is_timed=False, settings=settings)
    read = json.loads(json.dumps(found.as_json()))
    assert [row["seq_len"] for row in read["rows"]] == [row.seq_len for row in found.rows]
    assert read["rows"][-1]["setting"]["offload"] == ["checkpoints", "optimizer"]
    assert read["smallest"]["memory"]["peak"] == found.smallest.memory.peak
    for row in found.rows:
        assert str(row.setting) in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"cp": 0}}, "cp of mesh must be from 1"),
        ({"mesh": {"pp": 2}}, "a mesh has axes of"),
        ({"memory": 0}, "memory must be"),
        ({"seq_len": 0}, "seq_len must be"),
        ({"seq_len": 1001}, "1001 tokens cannot be divided over the 8 ranks of cp"),
        ({"settings": []}, "at least one MemorySetting"),
        ({"kv_dtype": "int4"}, "int4"),
        ({"strategy": "rings"}, "unknown strategy 'rings'"),
        ({"machine": "h1000"}, "machine 'h1000' is neither a file"),
        ({"config": {"model_type": "jamba"}}, "only gated and Kimi delta rules"),
    ],
)
def test_what_is_no_question(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as error:
        longest_sequences(**({"config": LLAMA, "mesh": {"cp": 8}} | options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "some"}, "checkpoint must be one of none, attention, full, got 'some'"),
        ({"mlp_tile": 0}, "mlp_tile must be"),
        ({"offload": "optimizer"}, "offload must be a list of names"),
        ({"offload": ["gradients"]}, "offload takes checkpoints and optimizer, each once"),
        ({"offload": ["checkpoints"]}, "offload of checkpoints needs checkpoint 'full'"),
        ({"policy": "int8"}, "policy must be a TransferPolicy, got 'int8'"),
    ],
)
def test_what_is_no_setting(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        memory_setting(**options)


def test_names_of_settings() -> None:
    assert str(MemorySetting()) == "nothing"
    assert str(MemorySetting(mlp_tile=4096)) == "MLP tiles of 4,096"
    policy = TransferPolicy(num_parts=1, kv_dtype="int8")
    full = MemorySetting("full", 4096, ("checkpoints", "optimizer"), policy)
    assert str(full) == (
        "full checkpoints, MLP tiles of 4,096, checkpoints and optimizer on the host, num_parts=1, "
        "keys as int8"
    )


def test_eight_bits_take_no_less_memory() -> None:
    plain, rounded = (
        longest_sequences(
            *(LLAMA, {"cp": 8}), is_timed=False, kv_dtype=x, settings=SETTINGS[-1:]
        ).rows[0]
        for x in (None, "int8")
    )
    assert rounded.setting.as_json()["kv_dtype"] == "int8"
    assert 0.9 * plain.seq_len < rounded.seq_len <= plain.seq_len


def test_a_cpu_has_more_than_a_gpu_needs_inside() -> None:
    """Kernels on GPUs sum gradients of queries in float32, and more partial results are kept."""
    cpu = replace(H100, host_waits=True)
    of_cpu, of_gpu = (
        longest_sequences(LLAMA, {"cp": 8}, x, is_timed=False, settings=SETTINGS[-1:]).rows[0]
        for x in (cpu, H100)
    )
    assert of_cpu.seq_len > of_gpu.seq_len
