"""The machine of an axis: one rank reads its file for all, and all hear of it if it cannot."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_ring import ContextParallel, SequenceAxis, ring_attention
from dtensor_ring.dtensor import axis as sequence_axis
from dtensor_ring.dtensor import choice
from tests.forced import machine_for
from tests.meshes import random_inputs
from tests.pool import Pool

RING = machine_for("ring")


def test_the_first_rank_reads_for_all(pool: Pool, tmp_path: Path) -> None:
    """Once; the other ranks of each ring have no such file."""
    path = tmp_path / "machine.json"
    path.write_text(RING.to_json())
    assert pool.run(4, _read, str(path)) == [1, 1, 0, 0]


def _read(path: str) -> int:
    """How often this rank reads a file."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))["cp"]
    name = path if mesh.get_local_rank() == 0 else f"{path}.missing"
    with patch.object(sequence_axis, "read_machine", wraps=sequence_axis.read_machine) as reads:
        axes = [SequenceAxis(mesh, strategy="auto", machine=name) for _ in range(2)]
    assert [axis.machine for axis in axes] == [RING] * 2
    return reads.call_count


BROKEN = {
    "missing": (None, r"neither a file that can be read .* nor one of"),
    "no JSON": ("{", r"machine file .* is not JSON"),
    "another schema": ('{"schema": 99}', r"has schema 99, this version reads"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_of_all_ranks(pool: Pool, name: str, tmp_path: Path) -> None:
    text, error = BROKEN[name]
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    pool.run(2, _check_broken, str(path), rf"rank 0, which reads the machine.*{error}")


def _check_broken(path: str, error: str) -> None:
    """The axis is as before, so it can be configured again, and its group is of use."""
    mesh = init_device_mesh("cpu", (2,))
    for _ in range(2):
        with pytest.raises(ValueError, match=error):
            SequenceAxis(mesh, strategy="auto", machine=path)
    axis = SequenceAxis(mesh, strategy="auto", machine=RING)
    query, key, value, _ = random_inputs()
    assert axis.attention(query, key, value).shape == query.shape


def test_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Types, other machines, and the file of another device than this GPU."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh, wrong = init_device_mesh("cpu", (2,)), "machine must be a Machine, a name"
        for make in (
            lambda machine: SequenceAxis(mesh, machine=machine),
            lambda machine: ContextParallel(machine=machine),
        ):
            given: Any = 3
            with pytest.raises(TypeError, match=wrong):
                make(given)
        path = tmp_path / "machine.json"
        path.write_text(replace(RING, device="NVIDIA H100").to_json())
        group = mesh.get_group()
        assert sequence_axis.shared_machine(group, path).device == "NVIDIA H100"  # a dry run
        monkeypatch.setattr(sequence_axis, "device_name", lambda _: "NVIDIA A100")
        with pytest.raises(ValueError, match="is of NVIDIA H100, not of NVIDIA A100"):
            sequence_axis.shared_machine(group, f"{path.parent}/./machine.json", "cuda")
        axis = SequenceAxis(mesh, strategy="auto", machine=RING)
        assert pickle.loads(pickle.dumps(axis.__reduce__()[0])).keywords["machine"] == RING
        with pytest.raises(ValueError, match="chosen by the heads of a call"):
            axis.prepare(16)
    finally:
        dist.destroy_process_group()


def test_the_data_sheet_of_a_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its name, else that of the default; it is said once, by the first rank of an axis."""
    sheets = {name: replace(RING, name=name) for name in ("a100", "h100")}
    for module in (choice, sequence_axis):
        monkeypatch.setattr(module, "preset_names", sheets.keys)
        monkeypatch.setattr(module, "read_machine", sheets.__getitem__)
    assert choice.data_sheet_of("cpu").name == "h100"
    monkeypatch.setattr(choice, "device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    assert choice.data_sheet_of("cuda").name == "a100"
    caplog.set_level(logging.WARNING, "dtensor_ring")
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh, x = init_device_mesh("cpu", (2,)), torch.randn(1, 2, 8, 4)
        for _ in range(2):
            ring_attention(x, x, x, mesh=mesh, strategy="auto")
        dist.destroy_process_group()
    (record,) = caplog.records
    assert "goes by the data sheet of a100" in record.getMessage()
