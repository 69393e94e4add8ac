"""Groups that come and go: DTensor keeps meshes of the past, and they find the groups of today.

Within one run: between runs the pool clears the caches of DTensor that this is about.
"""

from __future__ import annotations

import io
import pickle
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_ring import Mask, SequenceAxis, ring_attention, shard_sequence, unshard_sequence
from tests.dense import dense_attention
from tests.meshes import annotated_mesh, place, random_inputs
from tests.pool import on_ranks

ANOTHER_WORLD = "was made before .* and a new init_process_group: make the mesh again"


def new_world(name: str) -> None:
    """The same ranks, in a new default group."""
    store, rank, size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)


def new_mesh() -> DeviceMesh:
    """An annotated axis over a new group."""
    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    SequenceAxis(mesh, "zigzag")
    return mesh


def check_attention(mesh: DeviceMesh) -> None:
    """On results of DTensor's ops, which it may keep with a mesh of the past."""
    *inputs, grad_out = random_inputs(kv_heads=4)
    dense = dense_attention(*inputs, Mask.causal())
    expected = dense.out, *dense.backward(grad_out)
    for attend in (_sdpa, ring_attention):
        leaves = [shard_sequence(x, mesh, 2).requires_grad_() for x in inputs]
        out = attend(*(x * 1 for x in leaves))
        grad = shard_sequence(grad_out, mesh, 2)
        results = out * 1, *torch.autograd.grad(out, leaves, grad)
        for actual, whole in zip(results, expected, strict=True):
            torch.testing.assert_close(
                unshard_sequence(actual, 2).double(), whole, atol=1e-5, rtol=1e-5
            )


def check_results(mesh: DeviceMesh) -> None:
    """What a user does with results of DTensor's ops, which need this rank's place on the axis."""
    tokens = torch.arange(16.0).square()
    sharded = shard_sequence(tokens, mesh, 0) * 2
    for of in (
        lambda x: x[-1],
        lambda x: x[[3, 12]],
        lambda x: x.amax(0),
        lambda x: x + torch.arange(16.0),
    ):
        found = of(sharded)
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.equal(whole, of(tokens * 2))
    pieces = sharded.__create_chunk_list__()
    assert all(sharded.__get_tensor_shard__(MetadataIndex("x", x.offsets)).numel() for x in pieces)


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@on_ranks(2)
def test_groups_of_the_same_ranks() -> None:
    local, old = [torch.randn(1, 2, 4, 8) for _ in range(3)], None
    for world in range(2):
        for _ in range(2):
            mesh = new_mesh()
            check_attention(mesh)
            check_results(mesh)
            expected = ring_attention(*local, mesh=mesh)
            assert torch.equal(ring_attention(*local, mesh=old or mesh), expected)
            dist.destroy_process_group(mesh.get_group())
            with pytest.raises(ValueError, match=r"over ranks \[0, 1\] was destroyed: make the m"):
                ring_attention(*local, mesh=mesh)
            old = mesh
        if not world:
            new_world("again")
            # Takes the name that the group of the same ranks had.
            dist.new_group([0])
            with pytest.raises(ValueError, match=ANOTHER_WORLD):
                ring_attention(*local, mesh=old)
            old = None


@on_ranks(3)
def test_ranks_out_of_order() -> None:
    """The ranks of a group ascend, whatever the mesh says."""
    mesh = DeviceMesh("cpu", [2, 0, 1])
    local = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    with pytest.raises(ValueError, match=r"has the ranks \[2, 0, 1\] .* make the mesh with ascen"):
        ring_attention(*local, mesh=mesh)


@on_ranks(2)
def test_tensors_of_another_world() -> None:
    """Groups of the new world take their names, so torch takes their meshes for meshes of today."""
    whole = torch.arange(16.0).view(1, 1, 16, 1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    SequenceAxis(mesh["cp"], "zigzag")
    seen = shard_sequence(whole, mesh["cp"], 2)
    # Known to us by another mesh of its world only.
    unseen = DTensor.from_local(seen.to_local(), mesh, [Replicate(), Shard(2)])
    new_world("another")
    calls = _sdpa, ring_attention, lambda *x: unshard_sequence(x[0], 2)
    for is_annotated in (False, True):
        for old, call in product((seen, unseen), calls):
            with pytest.raises(ValueError, match=ANOTHER_WORLD):
                call(old, old, old)
        with pytest.raises(ValueError, match=ANOTHER_WORLD):
            SequenceAxis(mesh["cp"], "zigzag")
        again = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        if not is_annotated:
            SequenceAxis(again["cp"], "striped")
    sharded = shard_sequence(whole, again["cp"], 2) * 1
    assert torch.equal(unshard_sequence(sharded, 2), whole)


@on_ranks(4)
def test_rows_of_a_batch_over_another_axis() -> None:
    """Boundaries by row, for which a rank looks up its place on the axis of the batch."""
    *inputs, _ = random_inputs(batch=4)
    cu_seqlens = torch.tensor([[0, 3, 16], [0, 5, 16], [0, 7, 16], [0, 9, 16]], dtype=torch.int32)
    expected = dense_attention(*inputs, Mask.causal(), cu_seqlens=cu_seqlens).out
    placements = Shard(0), Shard(2)
    for name in ("first", "second", "third"):
        mesh = annotated_mesh((2, 2), placements, "zigzag")
        leaves = [place(x, mesh, placements) * 1 for x in inputs]
        out = ring_attention(*leaves, cu_seqlens=cu_seqlens)
        mine = place(expected, mesh, placements).to_local()
        torch.testing.assert_close(out.to_local().double(), mine, atol=1e-5, rtol=1e-5)
        new_world(name)
        dist.new_group([0])


@on_ranks(1)
def test_compiled_in_a_second_world() -> None:
    """The first one knows nothing of attention, and its mesh is what DTensor's fakes have."""
    for world in ("first", "second", "third"):
        mesh = init_device_mesh("cpu", (1,))
        if world != "first":
            SequenceAxis(mesh, "zigzag")
        attend = _double if world == "first" else _attend_doubled
        inputs = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
        placed = [DTensor.from_local(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in inputs]
        out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*placed)
        grads = torch.autograd.grad(out.sum(), placed)
        expected = attend(*inputs)
        torch.testing.assert_close(out, expected)
        for grad, whole in zip(grads, torch.autograd.grad(expected.sum(), inputs), strict=True):
            torch.testing.assert_close(grad.to_local(), whole)
        torch._dynamo.reset()
        new_world(world)


def _double(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _local(query * 2 + key * 2 + value * 2)


def _attend_doubled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _local(_sdpa(query * 2, key * 2, value * 2))


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@on_ranks(2)
def test_tensors_are_saved_without_groups() -> None:
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "zigzag")
    inputs = [shard_sequence(torch.randn(1, 2, 8, 4), mesh, 2) for _ in range(3)]
    out = ring_attention(*inputs)
    loaded = pickle.loads(pickle.dumps(out))
    assert torch.equal(loaded.to_local(), out.to_local())
    for length in (8, 7):  # shards of one length, and of two
        part = shard_sequence(torch.randn(1, length), mesh, 1)
        torch.save(part, saved := io.BytesIO())
        saved.seek(0)
        assert torch.equal(torch.load(saved).full_tensor(), part.full_tensor())
    assert torch.equal(ring_attention(*inputs).to_local(), out.to_local())
