"""What `estimate --longest` counts, next to real steps on two ranks at three lengths."""

from __future__ import annotations

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

from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training import layer_run
from dtensor_ring.lab.training.model_source import layers_of
from dtensor_ring.lab.training.step_memory import (
    AttentionRoom,
    RunBytes,
    StepMemory,
    fetched_layers,
    step_memory,
)
from dtensor_ring.lab.training.step_request import MemorySetting, step_request
from parallel_plans.huggingface import context_parallel_plan, ring_checkpoint_contexts
from tests.pool import Pool

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
