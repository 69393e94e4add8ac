"""Outputs are ordinary tensors: they may be changed in place, as those of PyTorch's attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_ring import SequenceAxis, ring_attention, shard_sequence
from tests.meshes import random_inputs
from tests.pool import Pool, on_ranks

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda out: out.mul_(2),
    "moved": lambda out: out.add_(1),
    "in part": lambda out: out.select(3, 0).zero_(),
    "through a view": lambda out: out.transpose(1, 2).mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_outputs_change_in_place(change: str) -> None:
    """As those of PyTorch's attention in one process: the next backward sees that they did."""
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "zigzag")
    whole = [x.requires_grad_() for x in random_inputs(kv_heads=4)[:3]]
    shards = [shard_sequence(x.detach(), mesh, 2) for x in whole]
    placed = [x.requires_grad_() for x in shards]
    local = [x.to_local().detach().requires_grad_() for x in shards]
    for attend in (
        partial(F.scaled_dot_product_attention, *whole),
        partial(ring_attention, *local, mesh=mesh),
        partial(ring_attention, *placed),
        partial(F.scaled_dot_product_attention, *placed),
    ):
        out, same = attend(), attend().detach()
        CHANGES[change](out)
        CHANGES[change](same)
        assert torch.equal(_shard(out), _shard(same))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def _shard(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@on_ranks(1)
def test_outputs_of_no_grad_change_in_place() -> None:
    mesh, factor = init_device_mesh("cpu", (1,)), torch.ones((), requires_grad=True)
    with torch.no_grad():
        out = ring_attention(*random_inputs()[:3], mesh=mesh)
    expected = out.sum()
    out.mul_(factor).sum().backward()
    torch.testing.assert_close(factor.grad, expected)


def test_async_save_stages_the_tokens(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _check_staged, str(tmp_path))


def _check_staged(folder: str) -> None:
    """What `async_save` copies of a sequence, attribute by attribute, has the content of it."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(13.0)
    x = shard_sequence(whole, mesh, 0, layout="zigzag")
    dcp.async_save({"x": x}, checkpoint_id=folder).result()
    read = torch.zeros(13)
    dcp.load({"x": read}, checkpoint_id=folder)
    assert torch.equal(read, whole)
