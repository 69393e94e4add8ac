"""The longest sequence of a step, by the laboratory and next to real steps."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from parts.small_models import small_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from docs.long_table import LLAMA
from dtensor_ring import longest_sequences
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training import layer_run
from dtensor_ring.lab.training.longest import SETTINGS, SPARE, UNIT
from dtensor_ring.lab.training.model_source import layers_of
from dtensor_ring.lab.training.step import simulate_step
from dtensor_ring.lab.training.step_memory import (
    AttentionRoom,
    RunBytes,
    StepMemory,
    fetched_layers,
    step_memory,
)
from dtensor_ring.lab.training.step_request import MemorySetting, memory_setting, step_request
from dtensor_ring.transport.transport import TransferPolicy
from parallel_plans.huggingface import context_parallel_plan, ring_checkpoint_contexts
from tests.pool import Pool

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


# What `estimate --longest` counts, next to real steps on two ranks at three lengths.

RANKS = 2
CPU = replace(as_machine("h100"), host_waits=True, gemm={"float32": 1e12, "bfloat16": 1e12})
TILE = 128


class Case(NamedTuple):
    """A model and what its steps do to take less memory."""

    model: str
    setting: MemorySetting
    dtype: str = "float32"
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    is_sharded: bool = False


CASES = [
    Case("llama", MemorySetting("full", TILE, ("checkpoints",)), lengths=(512, 1024, 2048)),
    *(
        pytest.param(case, marks=pytest.mark.repeats)
        for case in (
            Case("llama", MemorySetting("full", TILE, ("checkpoints",))),
            # What FSDP2 gathers of so small a model is as large as activations of fewer tokens.
            Case("llama", MemorySetting("full"), lengths=(2048, 4096, 8192), is_sharded=True),
            Case("llama", MemorySetting()),
            Case("llama", MemorySetting("full")),
            Case("llama", MemorySetting("full"), "bfloat16"),
            Case("llama", MemorySetting("full", TILE), "bfloat16"),
            Case("llama", MemorySetting("attention", TILE)),
            Case("qwen3_moe", MemorySetting("full", TILE, ("checkpoints",))),
            Case("qwen3_moe", MemorySetting("full")),
            Case("qwen3_moe", MemorySetting("attention"), "bfloat16"),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}, {case.setting}")
def test_real_steps_take_what_is_counted(pool: Pool, case: Case) -> None:
    """At three lengths: within 10 %, and so is what grows with the length, and what does not."""
    counted = [_counted(case, x) for x in case.lengths]
    for measured in pool.run(RANKS, _measured, case):
        for (real, on_host), (expected, expected_on_host) in zip(measured, counted, strict=True):
            assert expected == pytest.approx(real, rel=0.10)
            assert expected_on_host == on_host
        (first, middle, last), counts = (x[0] for x in measured), [x[0] for x in counted]
        assert counts[2] - counts[1] == pytest.approx(last - middle, rel=0.10)
        # Of a line through two points, in parts of the first: all lengths are in proportion.
        offsets = 2 * first - middle, 2 * counts[0] - counts[1]
        assert offsets[1] == pytest.approx(offsets[0], abs=0.10 * first)


class Bytes:
    """A host whose memory no tracker of tensors sees, which has the inputs of layers."""

    def __init__(self) -> None:
        self.held = self.largest = 0

    def run(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        # The checkpoint's own hooks see all that its layer saves; these hooks see its inputs only.
        with saved_tensors_hooks(self.pack, self.unpack):
            return forward(*args, **kwargs)

    def pack(self, x: Tensor) -> Any:
        self.held += x.nbytes
        self.largest = max(self.largest, x.nbytes)
        words = x.detach().contiguous().view(torch.uint8)
        return words.numpy().tobytes(), x.shape, x.dtype

    def unpack(self, x: Any) -> Tensor:
        content, shape, dtype = x
        return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def _checkpoint_layers(module: nn.Module, kind: str, host: Bytes | None) -> None:
    how: Any = {} if kind == "full" else {"context_fn": ring_checkpoint_contexts}
    for layer in layers_of(module):
        forward = partial(checkpoint, layer.forward, use_reentrant=False, **how)
        layer.forward = forward if host is None else partial(host.run, forward)


def _measured(case: Case) -> list[tuple[int, int]]:
    """Return for each length the most bytes at once, and those on the host.

    Without parameters and gradients, but for a model whose are sharded.
    """
    return [_step(case, seq_len) for seq_len in case.lengths]


def _step(case: Case, seq_len: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    model = small_model(case.model, seq_len).to(getattr(torch, case.dtype))
    model = parallelize_module(model, mesh, context_parallel_plan(model))
    if case.setting.mlp_tile is not None:
        _run_in_tiles(model, case.setting.mlp_tile)
    host = Bytes() if "checkpoints" in case.setting.offload else None
    if case.setting.checkpoint != "none":
        _checkpoint_layers(model, case.setting.checkpoint, host)
    if case.is_sharded:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
            module.set_force_sum_reduction_for_comms(True)
    tokens = torch.zeros(1, seq_len, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        if not case.is_sharded:
            for parameter in model.parameters():  # after the hooks of the tracker
                parameter.register_post_accumulate_grad_hook(_drop)
        loss.backward()
    peaks = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    if case.is_sharded:
        return peaks["Total"], 0
    if host is None:
        return _activations(peaks), 0
    # A prefetch would have inputs of the next layers here, which these hooks do not.
    ahead = fetched_layers(case.setting.checkpoint) - 1
    return _activations(peaks) + ahead * host.largest, host.held


def _drop(parameter: Tensor) -> None:
    """Free a gradient when it is there, as FSDP2 does: so the fullest moment is of activations."""
    parameter.grad = None


def _activations(peaks: dict[Any, int]) -> int:
    """Return the bytes of all but parameters, buffers and gradients."""
    states = "Parameter", "Gradient", "Buffer"
    return peaks["Total"] - sum(peaks[x] for x in states)


def _run_in_tiles(model: nn.Module, size: int) -> None:
    """Run norms and MLPs over tiles of tokens that are computed again in backward."""
    norms = [x for layer in model.model.layers for x in layer.children() if "Norm" in str(type(x))]
    mlps = [layer.mlp for layer in model.model.layers]
    for module in (*norms, *mlps, model.model.norm):
        module.forward = partial(_in_tiles, module.forward, size)


def _in_tiles(run: Any, size: int, x: Tensor) -> Tensor:
    tiles = x.split(size, 1)
    return torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in tiles], 1)


def _counted(case: Case, seq_len: int) -> tuple[int, int]:
    """Return the same numbers by the formula of `estimate --longest`.

    Without what is inside of attentions and of the loss, which are one op each: the tracker sees
    what ops return.
    """
    config = small_model(case.model, seq_len).config
    asked = step_request(config, seq_len, {"cp": RANKS}, CPU, dtype=case.dtype)
    shards, rooms = RANKS if case.is_sharded else 1, [AttentionRoom()] * len(asked.model.layers)
    with (
        patch.object(layer_run, "_loss", _returned),
        patch.object(RunBytes, "fullest", partialmethod(_without_gradients, RunBytes.fullest)),
    ):
        layer_run.head_run.cache_clear()
        found = step_memory(asked.model, asked.shard, shards, case.setting, rooms)
        layer_run.head_run.cache_clear()
    # Gradients of a whole model are freed one by one, and its parameters are there in any case.
    without = found.optimizer
    if not case.is_sharded:
        without += found.parameters + found.gathered
    return found.peak - without, found.host


def _without_gradients(run: RunBytes, fullest: Any, state: StepMemory, how: Any, _: Any) -> Any:
    return fullest(run, state._replace(gradients=0), how)


def _returned(x: Tensor, *_: Any) -> Tensor:
    """Return a loss with nothing inside, whose gradient is as large as its input."""
    return layer_run.opaque(
        lambda given: (given.new_empty(()), (given,)),
        lambda kept, _: (torch.empty_like(kept[0]),),
        [x],
    )
