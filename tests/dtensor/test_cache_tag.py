"""Graphs that were compiled run for the axes and modules that they were made of only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.compiler.config as compiler
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import (
    ContextParallel,
    Mask,
    SequenceAxis,
    TransferPolicy,
    ZigZag,
    decode_attention,
    ring_attention,
    shard_sequence,
)
from dtensor_ring.dtensor.annotation import Annotation, constants_of
from dtensor_ring.dtensor.axis_config import UNANNOTATED
from dtensor_ring.dtensor.cache_tag import tag_caches
from tests.dense import dense_attention
from tests.meshes import SEQUENCE, assert_same, place, random_inputs
from tests.pool import Pool, on_ranks

CAUSAL = Mask.causal()


def _ring(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return ring_attention(query, key, value, mask=CAUSAL)


def _stock(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


# torch has a tag for each thread, which need not be that of the annotation.
@pytest.mark.parametrize(
    ("attend", "seq_len", "in_thread"), [(_ring, 13, False), (_stock, 15, True)]
)
def test_layouts_have_graphs_of_their_own(
    pool: Pool, attend: Callable[..., Any], seq_len: int, in_thread: bool
) -> None:
    """Three runs with one cache; the shards of the first rank are longer."""
    for layout, num_known in [("contiguous", 0), ("zigzag", 0), ("contiguous", 1)]:
        found = pool.run(2, _check_layout, layout, attend, seq_len, in_thread)
        assert found == [num_known] * 2


def _check_layout(layout: str, attend: Callable[..., Any], seq_len: int, in_thread: bool) -> int:
    """The number of graphs that came from the cache."""
    counters.clear()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    SequenceAxis(mesh, layout)
    if in_thread:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(_check, attend, mesh, [SEQUENCE], seq_len).result()
    else:
        _check(attend, mesh, [SEQUENCE], seq_len)
    return counters["aot_autograd"]["autograd_cache_hit"]


@on_ranks(4)
def test_ranks_have_graphs_of_their_own() -> None:
    """The groups of two rings have different names; the first ring compiles first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    SequenceAxis(mesh["cp"], "zigzag")
    for ring in range(2):
        if ring == mesh.get_local_rank("dp"):
            _check(_ring, mesh, [Replicate(), SEQUENCE], seq_len=16)
        dist.barrier()


@pytest.mark.parametrize("layouts", [("zigzag", "contiguous"), (None, "zigzag")], ids=str)
@on_ranks(2)
def test_worlds_have_graphs_of_their_own(tmp_path: Path, layouts: tuple[str | None, ...]) -> None:
    """One function compiled once, over groups of one name and the same ranks."""
    rank = dist.get_rank()
    attend = torch.compile(_ring, fullgraph=True, backend="aot_eager")
    for layout in layouts:  # `None` is that of an axis that nobody annotated
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / str(layout)), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        if layout:
            SequenceAxis(mesh, layout)
        _compare(attend, mesh, [SEQUENCE], seq_len=16)


def test_ranks_of_unequal_heads_have_graphs_of_their_own(pool: Pool) -> None:
    """Local shards over an axis that nobody annotated: of 3 heads, the first rank gets 2."""
    for num_known in (0, 1):
        assert pool.run(2, _check_heads) == [num_known] * 2


def _check_heads() -> int:
    counters.clear()
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    query, key, value, _ = random_inputs(seq_len=16, heads=3, kv_heads=3)

    def attend(*shards: Tensor) -> Any:
        return ring_attention(*shards, mask=CAUSAL, mesh=mesh, strategy="ulysses")

    shards = [x.chunk(2, 2)[rank] for x in (query, key, value)]
    out = torch.compile(attend, fullgraph=True)(*shards)
    expected = dense_attention(query, key, value, CAUSAL).out.chunk(2, 2)[rank]
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    return counters["aot_autograd"]["autograd_cache_hit"]


def _check(
    attend: Callable[..., Any], mesh: DeviceMesh, placements: list[Placement], seq_len: int
) -> None:
    """Attention compiled by inductor equals the dense one."""
    _compare(torch.compile(attend, fullgraph=True), mesh, placements, seq_len)


def _compare(
    attend: Callable[..., Any], mesh: DeviceMesh, placements: list[Placement], seq_len: int
) -> None:
    whole = random_inputs(2, seq_len, kv_heads=4)[:3]
    out = attend(*(place(x, mesh, placements) for x in whole))
    assert_same(out, dense_attention(*whole, CAUSAL).out, placements)


@compiler.patch(cache_key_tag="mine")
def test_tag() -> None:
    axis = (0, 1), "3", "zigzag"
    tags = []
    for rank, axes in [(0, [axis]), (1, [axis]), (0, []), (0, [axis])]:
        tag_caches(rank, axes)
        tags.append(compiler.cache_key_tag)
    assert all(tag.startswith("mine ") for tag in tags)
    assert len({len(tag) for tag in tags}) == 1, "it does not grow"
    assert len({*tags}) == 3
    assert tags[0] == tags[3]


def test_what_is_in_the_tag() -> None:
    policy = TransferPolicy(grad_dtype=torch.bfloat16)
    fields: list[dict[str, Any]] = [
        *({"layout": ZigZag()}, {"strategy": "all_gather"}),
        *({"kernel": "reference"}, {"policy": policy}),
    ]
    axes = [Annotation((0, 1), replace(UNANNOTATED, **field), group_name="3") for field in fields]
    axes += [Annotation((0, 1), UNANNOTATED, group_name=name) for name in ("3", "4")]
    assert len({repr(constants_of(axis)) for axis in axes}) == len(axes)
    assert constants_of(Annotation((0, 1), group_name="3")) == constants_of(axes[-2])


def test_without_a_group() -> None:
    query, key, value, _ = random_inputs(seq_len=16, kv_heads=4)
    attend = torch.compile(decode_attention, fullgraph=True, backend="eager")
    out = attend(query, key, value, mask=Mask.full())
    expected = dense_attention(query, key, value, Mask.full()).out
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


# `torch.export` of modules that attend: one node, with the values of the module.


class Calls(nn.Module):
    """A function of one tensor, and what it has of modules."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Any:
        return self.function(x, **dict(self.named_children()))


class Attention(nn.Module):
    def forward(self, query: Any, key: Any, value: Any) -> Any:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@on_ranks(2)
def test_export() -> None:
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "zigzag")
    heads = shard_sequence(torch.randn(1, 4, 8, 4), mesh, 2)
    multihead = nn.MultiheadAttention(4, 2, batch_first=True)
    parts = {"attend": parallelize_module(multihead, mesh, ContextParallel())}
    cases = {
        "local": (Calls(lambda x: ring_attention(x, x, x, mesh=mesh)), heads.to_local()),
        "traded": (
            Calls(lambda x: ring_attention(x, x, x, mesh=mesh, strategy="ulysses")),
            heads.to_local(),
        ),
        "DTensors": (Calls(lambda x: ring_attention(x, x, x)), heads),
        "SDPA": (Calls(lambda x: Attention()(x, x, x)), heads),
        "module": (
            Calls(lambda x, attend: attend(x, x, x, need_weights=False)[0], **parts),
            heads.to_local()[:, 0],
        ),
    }
    for name, (module, x) in cases.items():
        program = torch.export.export(module, (x,))
        nodes = [str(node.target) for node in program.graph.nodes]
        assert sum("attention.default" in node for node in nodes) == 1, name
        found, expected = (
            out.to_local() if isinstance(out, DTensor) else out
            for out in (program.module()(x), module(x))
        )
        torch.testing.assert_close(found, expected, msg=name)
    styled = parallelize_module(Attention(), mesh, ContextParallel())
    module = Calls(lambda x, attend: attend(x, x, x), attend=styled)
    for strict in (False, True):
        with pytest.raises(Exception, match="cannot make DTensors of local tensors"):
            torch.export.export(module, (heads.to_local(),), strict=strict)
