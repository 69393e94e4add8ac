"""Labels of a ring's steps in a profiler's trace."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from dtensor_ring import ring_attention
from dtensor_ring.compute.trace import Label
from examples.profile_ring import write_trace
from tests.pool import Pool, on_ranks


def _labels(rank: int, world_size: int) -> set[str]:
    """Of a causal zigzag ring, in which every rank works on every source."""
    expected = set()
    for step in range(world_size):
        source = (rank - step) % world_size
        region = f"step {step}, source {source}"
        both: tuple[str, ...] = ("tile",)
        if step < world_size - 1:  # in the last step, nothing is in flight
            both += ("send", "wait") if step else ("pack", "send", "wait")
        # Nothing is summed before step 1, and no sum is in flight before step 2.
        sums = ("merge", "send sums")[: 2 * step] + ("wait for sums",)[: step // 2]
        merges = ("merge",)[: step // (world_size - 1)]
        expected |= {f"ring forward, {region}: {what}" for what in both + merges}
        expected |= {f"ring backward, {region}: {what}" for what in both + sums}
    home = f"ring backward, step {world_size - 1}, source {rank}"  # what others summed up
    return expected | {f"{home}: {what}" for what in ("wait for sums", "merge")}


def test_every_step_is_labelled(pool: Pool, tmp_path: Path) -> None:
    """In the traces of the example, which any reader of Chrome's format opens."""
    for rank, trace in enumerate(pool.run(3, _traced, tmp_path)):
        events = json.loads(trace.read_text())["traceEvents"]
        spans = [event for event in events if event.get("name", "").startswith("ring ")]
        assert {span["name"] for span in spans} == _labels(rank, 3)
        assert all(span["ph"] == "X" for span in spans), "they have a beginning and an end"
        firsts = [span for span in spans if span["name"].endswith("step 0, source 0: send")]
        assert len(firsts) == (4 if rank == 0 else 0), "two steps, forward and backward"


def _traced(folder: Path) -> Path:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return write_trace(mesh, 48, folder)


def test_a_compiled_call_has_the_same_labels(pool: Pool) -> None:
    eager, compiled = pool.run(1, _eager_and_compiled)[0]
    # A ring of one rank is one launch: nothing is merged or waited for.
    of_one = {f"ring {ring}, step 0, source 0: tile" for ring in ("forward", "backward")}
    assert eager == compiled == of_one


def _eager_and_compiled() -> list[set[str]]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    found = []
    for call in (ring_attention, torch.compile(ring_attention, backend="aot_eager")):
        call(x, x, x, mesh=mesh).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            call(x, x, x, mesh=mesh).sum().backward()
        found.append({event.name for event in profiler.events() if event.name.startswith("ring ")})
    return found


@on_ranks(1)
def test_nothing_is_recorded_without_a_profiler() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    with patch("torch.autograd.profiler.record_function", side_effect=AssertionError):
        ring_attention(x, x, x, mesh=mesh).sum().backward()
    assert Label("forward", 0, 0)("tile") is Label("backward", 1, 2)("merge")
