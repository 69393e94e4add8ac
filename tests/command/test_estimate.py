"""What `estimate` says, next to what a real step on two ranks allocates."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import _disable_current_modes

from dtensor_ring.command.footprint import Footprint
from dtensor_ring.command.storages import Storages
from dtensor_ring.compute.kernels.kernel import Kernel
from dtensor_ring.ops import schema
from dtensor_ring.transport import protocol
from dtensor_ring.transport.buffers import BufferPool
from examples.train_hf import small_model
from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.models import load
from dtensor_ring.command.main import main
from tests.pool import Pool

SEQ_LEN, BATCH, RANKS = 1024, 2, 2


class Measured(NamedTuple):
    """Bytes of a step on a rank."""

    peak: int
    """By torch's own tracker, which sees what ops return, and not what they have inside."""
    parameters: int
    working: int
    """Of the attention that has most."""


def _measured(name: str, strategy: str) -> Measured:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    model = small_model(name, SEQ_LEN)
    plan = context_parallel_plan(model, "zigzag", strategy=strategy)
    model = parallelize_module(model, mesh, plan)
    tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step()
    peaks = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    model.zero_grad()
    loops: list[Storages] = []
    with (
        patch.object(schema, "ring_forward", _counted(schema.ring_forward, loops, 3)),
        patch.object(schema, "ring_backward", _counted(schema.ring_backward, loops, 4)),
    ):
        step()
    return Measured(peaks["Total"], peaks["Parameter"], max(loop.peak for loop in loops))


def _counted(run: Callable[..., Any], loops: list[Storages], place: int) -> Callable[..., Any]:
    """A loop that is counted, without what its kernel, the argument at that place, has inside."""

    def counted(*args: Any) -> Any:
        loops.append(Storages())
        arguments = [*args]
        arguments[place] = Uncounted(args[place], loops[-1])
        # Buffers of other calls would serve, which are not counted.
        with patch.object(protocol, "BUFFERS", BufferPool()), loops[-1]:
            return run(*arguments)

    return counted


class Uncounted:
    """A kernel of which results are counted only."""

    def __init__(self, kernel: Kernel, loop: Storages) -> None:
        self._kernel, self._loop = kernel, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernel, name)
        if name not in ("forward", "backward"):
            return found

        def run(*args: Any) -> Any:
            with _disable_current_modes():
                results = found(*args)
            self._loop.count(results)
            return results

        return run


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("llama", "ring"), ("llama", "ulysses"), ("gemma2", "ring"), ("deepseek_v3", "ring")],
)
def test_a_step_takes_what_was_estimated(
    pool: Pool, name: str, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _estimated(_written(name, tmp_path), capsys, "--strategy", strategy)
    for rank in pool.run(RANKS, _measured, name, strategy):
        print(rank, found['peak']-found['optimizer'],found['attention_working'])
        assert found["parameters"] == rank.parameters
        assert found["attention_working"] == pytest.approx(rank.working, rel=0.10)
        seen = found["peak"] - found["optimizer"]
        assert seen == pytest.approx(rank.peak, rel=0.15)


def _written(name: str, folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(small_model(name, SEQ_LEN).config.to_json_string(use_diff=False))
    return path


def _estimated(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    command = ["estimate", "--model", str(path), "--seq-len", str(SEQ_LEN), "--mesh"]
    command += [f"cp={RANKS}", "--batch", str(BATCH), *options]
    capsys.readouterr()
    assert main(load, [*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)
