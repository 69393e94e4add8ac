"""The layout "auto" of a plan is the fastest for the masks of its layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_ring import SequenceAxis, sequence_layout
from tests.families import small_model
from tests.forced import machine_for
from tests.huggingface.planned import under_plan

FOUND = {
    "Llama": "zigzag",
    "Mistral, short window": "contiguous",
    "Gemma 3": "zigzag",
    # Its layers with states need neighbouring tokens.
    "Qwen3.5": "contiguous",
}


@pytest.mark.parametrize("family", FOUND)
def test_layout(family: str) -> None:
    # The speed of another dtype stands for float32.
    machine = machine_for("ring")
    machine = replace(machine, kernels=tuple(replace(x, dtype="bfloat16") for x in machine.kernels))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        model = small_model(family)
        under_plan(model, "auto", machine=machine)
        layout = sequence_layout(mesh)
        assert layout is not None
        assert layout.spec == FOUND[family]
        assert SequenceAxis(mesh, layout).machine == machine
    finally:
        dist.destroy_process_group()


def test_without_masks() -> None:
    """An axis alone does not know them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match=r"before masks are seen.* pass choose_layout\(mask"):
            SequenceAxis(init_device_mesh("cpu", (2,)), "auto")
    finally:
        dist.destroy_process_group()
