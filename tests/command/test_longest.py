"""What `estimate --longest` counts, next to real steps on two ranks at three lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from small_models import small_model
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from dtensor_ring.command.layer_checkpoints import HostMemory, checkpoint_layers
from dtensor_ring.command.main import main
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.simulate.training.layer_attention import attention_rooms
from dtensor_ring.simulate.training.memory_setting import MemorySetting
from dtensor_ring.simulate.training.step_memory import step_memory
from dtensor_ring.simulate.training.step_request import step_request
from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.models import load, read_config
from tests.pool import Pool

RANKS, LENGTHS = 2, (2048, 4096, 8192)
CPU = replace(as_machine("h100"), host_waits=True, gemm={"float32": 1e12, "bfloat16": 1e12})
TILE = 128


class Case(NamedTuple):
    """A model and what its steps do to take less memory."""

    model: str
    setting: MemorySetting
    dtype: str = "float32"
    is_sharded: bool = False


class Bytes(HostMemory):
    """A host whose memory no tracker of tensors sees."""

    def pack(self, x: Tensor) -> Any:
        super().pack(x)
        # numpy has no bfloat16, and a tensor of numpy's memory is a tensor.
        words = x.detach().contiguous().view(torch.uint8)
        return np.array(words).tobytes(), x.shape, x.dtype

    def unpack(self, x: Any) -> Tensor:
        content, shape, dtype = x
        return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def _measured(case: Case, seq_len: int) -> tuple[int, int]:
    """Return the most bytes at once, without parameters, and those that went to the host."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    model = small_model(case.model, seq_len).to(getattr(torch, case.dtype))
    model = parallelize_module(model, mesh, context_parallel_plan(model))
    if case.setting.mlp_tile is not None:
        _run_in_tiles(model, case.setting.mlp_tile)
    host = Bytes() if "checkpoints" in case.setting.offload else None
    if case.setting.checkpoint != "none":
        checkpoint_layers(model, case.setting.checkpoint, host)
    if case.is_sharded:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
            module.set_force_sum_reduction_for_comms(True)
    tokens = torch.zeros(1, seq_len, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    peaks = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return peaks, 0 if host is None else host.held


def _run_in_tiles(model: nn.Module, size: int) -> None:
    """Run norms and MLPs over tiles of tokens that are computed again in backward."""
    norms = [x for layer in model.model.layers for x in layer.children() if "Norm" in str(type(x))]
    mlps = [layer.mlp for layer in model.model.layers]
    for module in (*norms, *mlps, model.model.norm):
        module.forward = partial(_in_tiles, module.forward, size)


def _in_tiles(run: Any, size: int, x: Tensor) -> Tensor:
    tiles = x.split(size, 1)
    return torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in tiles], 1)


def _counted(case: Case, seq_len: int, config: Any) -> tuple[int, int]:
    """Return the same two numbers by the formula of `estimate --longest`."""
    asked = step_request(config, seq_len, {"cp": RANKS}, CPU, dtype=case.dtype)
    asked = asked._replace(setting=case.setting)
    shards = RANKS if case.is_sharded else 1
    found = step_memory(asked.model, asked.shard, shards, case.setting, attention_rooms(asked))
    return found.peak - found.optimizer, found.host
