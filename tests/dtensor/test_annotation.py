"""A mesh axis has one layout, whichever mesh it is seen through, while its groups live."""

from __future__ import annotations

import io
import pickle
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_ring import (
    Balanced,
    Contiguous,
    Mask,
    SequenceAxis,
    Striped,
    ZigZag,
    ring_attention,
    sequence_layout,
    sequence_runs,
    shard_sequence,
    unshard_sequence,
)
from dtensor_ring.dtensor.annotation import axis_group, config_of_call, group_of
from dtensor_ring.planning.layout import Layout
from tests.dense import dense_attention
from tests.meshes import SEQUENCE, annotated_mesh, place, random_inputs
from tests.pool import Pool, on_ranks
from tests.rings import fake_group

SIZES, NAMES = (2, 2), ("dp", "cp")


@on_ranks(4)
def test_one_layout_per_axis() -> None:
    mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=NAMES)
    assert sequence_layout(mesh["cp"]) is None
    SequenceAxis(mesh["cp"], "zigzag")
    SequenceAxis(mesh["cp"], ZigZag())  # the same again
    assert sequence_layout(mesh["cp"]) == ZigZag()
    assert sequence_layout(mesh["dp"]) is None
    SequenceAxis(mesh["dp"], Contiguous())
    assert sequence_layout(mesh["dp"]) == Contiguous()

    # DTensor may put an equal mesh in the place of this one.
    equal = init_device_mesh("cpu", SIZES, mesh_dim_names=NAMES)
    assert sequence_layout(equal["cp"]) == ZigZag()
    # The last object is what plain calls go by, on any mesh of the same ranks.
    for axis, layout in ((mesh["cp"], Striped()), (equal["cp"], ZigZag())):
        SequenceAxis(axis, layout)
        assert sequence_layout(mesh["cp"]) == sequence_layout(equal["cp"]) == layout


@on_ranks(1)
def test_one_rank_has_any_order() -> None:
    mesh = init_device_mesh("cpu", (1,))
    for layout in ("zigzag", "striped"):
        SequenceAxis(mesh, layout)
    assert sequence_layout(mesh) == Striped()


def test_forgotten_with_the_world(pool: Pool) -> None:
    for layout in ("zigzag", "striped"):
        pool.run(2, _check_forgotten, layout)  # in the same processes


def _check_forgotten(layout: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    assert sequence_layout(mesh) is None
    SequenceAxis(mesh, layout)


@on_ranks(1)
def test_groups_are_those_of_the_mesh() -> None:
    with fake_group(4):
        mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=NAMES)
        for axis in (0, 1, 0, 1):
            assert group_of(mesh, axis) is mesh.get_group(axis)
        assert axis_group(mesh["cp"]) is mesh.get_group("cp")
    # Destroyed, and not yet made again: what was found once is not kept alive.
    with fake_group(4), pytest.raises(ValueError, match="make the mesh again"):
        group_of(mesh, 1)


BALANCED = Balanced(Mask.causal(), 16, 2, (0, 10, 16), block=2)
ANOTHER = Balanced(Mask.causal(), 16, 2, (0, 13, 16), block=2)

# Two layouts of an axis one after the other, and the error; `None` is a use without one.
TWICE: dict[str, tuple[Any, Any, str]] = {
    "another batch": (BALANCED, ANOTHER, ""),
    "balanced, zigzag": (BALANCED, ZigZag(), ""),
    "zigzag, balanced": (ZigZag(), BALANCED, ""),
    "used, balanced": (
        None,
        BALANCED,
        "contiguous, it cannot become balanced: .* annotate it first",
    ),
}


@pytest.mark.parametrize("name", TWICE)
@on_ranks(2)
def test_annotated_twice(name: str) -> None:
    first, second, message = TWICE[name]
    mesh = init_device_mesh("cpu", (2,))
    if first is None:
        config_of_call(mesh.get_group(), with_runs=False)
    else:
        SequenceAxis(mesh, first)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        SequenceAxis(mesh, second)
    assert sequence_layout(mesh) == (first if message else second)


@on_ranks(2)
def test_used_without_runs() -> None:
    """Tokens that were sharded contiguously are in no other order."""
    mesh = init_device_mesh("cpu", (2,))
    inputs = [shard_sequence(torch.randn(1, 2, 16, 4), mesh, 2) for _ in range(3)]
    with pytest.raises(ValueError, match=r"was used unannotated, .* contiguous, .* runs"):
        ring_attention(*inputs, runs=sequence_runs(BALANCED))
    with pytest.raises(ValueError, match=r"sharded with the layout contiguous, .* layout out"):
        unshard_sequence(inputs[0], 2, BALANCED)


@on_ranks(2)
def test_used_with_runs() -> None:
    """Whoever forgets them the next time gets no contiguous attention instead."""
    mesh = init_device_mesh("cpu", (2,))
    local = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    ring_attention(*local, runs=sequence_runs(BALANCED), mesh=mesh)
    with pytest.raises(ValueError, match=r"was used .* balanced, .* call ring_attention"):
        ring_attention(*local, mesh=mesh)
    sharded = DTensor.from_local(local[0], mesh, [SEQUENCE], run_check=False)
    with pytest.raises(ValueError, match=r"makes it balanced, .* pass the Balanced layout"):
        unshard_sequence(sharded, 2)
    with pytest.raises(ValueError, match=r"makes it balanced, it cannot become zigzag"):
        SequenceAxis(mesh, "zigzag")


NEEDS_RUNS = r"is annotated balanced, .*call ring_attention\(\.\.\., runs=sequence_runs\(layout\)\)"
# Annotation of the axis, whether the call brings runs, and its layout or the error.
RESOLVED: dict[str, tuple[Layout | None, bool, Layout | str]] = {
    "none": (None, False, Contiguous()),
    "none, runs": (None, True, BALANCED),
    "striped": (Striped(), False, Striped()),
    "zigzag, runs": (ZigZag(), True, "is annotated zigzag, .* in that order: leave runs out, or"),
    "balanced": (BALANCED, False, NEEDS_RUNS),
    "balanced, runs of another batch": (ANOTHER, True, BALANCED),
}


@pytest.mark.parametrize("name", RESOLVED)
@on_ranks(2)
def test_layout_of_a_call(name: str) -> None:
    annotated, with_runs, expected = RESOLVED[name]
    mesh, whole = init_device_mesh("cpu", (2,)), torch.randn(3, 1, 2, 16, 4)
    if annotated:
        SequenceAxis(mesh, annotated)
    layout = Contiguous() if isinstance(expected, str) else expected
    mine = layout.positions(dist.get_rank(), 2, 16)
    local = [x[:, :, mine].clone() for x in whole]
    sharded = [DTensor.from_local(x, mesh, [SEQUENCE], run_check=False) for x in local]
    runs = sequence_runs(BALANCED) if with_runs else None
    if isinstance(expected, str):
        for inputs, over in ((local, mesh), (sharded, None)):
            with pytest.raises(ValueError, match=expected):
                ring_attention(*inputs, runs=runs, mesh=over)
    else:
        assert config_of_call(mesh.get_group(), with_runs).layout.name == expected.name
        dense = F.scaled_dot_product_attention(*whole, is_causal=True)[:, :, mine]
        torch.testing.assert_close(ring_attention(*local, runs=runs, mesh=mesh), dense)
        torch.testing.assert_close(ring_attention(*sharded, runs=runs).to_local(), dense)


@on_ranks(2)
def test_unmodified_attention_has_no_runs() -> None:
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, BALANCED)
    x = DTensor.from_local(torch.randn(1, 2, 8, 4), mesh, [SEQUENCE], run_check=False)
    for mode in (nullcontext, torch.no_grad, torch.inference_mode):
        for options in ({}, {"is_causal": True}):
            with mode(), pytest.raises(ValueError, match=NEEDS_RUNS):
                F.scaled_dot_product_attention(x, x, x, **options)


REFUSALS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "two axes": (NAMES, "zigzag", ValueError, r'over one axis, got .*; pick .* mesh\["cp"\]'),
    "two axes without names": (None, "zigzag", ValueError, r"mesh_dim_names=\.\.\."),
    "unknown name": ("cp", "spiral", ValueError, "'spiral'; known layouts: contiguous, striped, z"),
    "no name": ("cp", 3, TypeError, "a layout is a Layout or its name, got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
@on_ranks(4)
def test_refusal(name: str) -> None:
    axes, layout, error, message = REFUSALS[name]
    mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=NAMES if axes else None)
    axis = mesh[axes] if isinstance(axes, str) else mesh
    with pytest.raises(error, match=message):
        SequenceAxis(axis, layout)
    if axis.ndim == 1:
        assert sequence_layout(axis) is None
    else:
        with pytest.raises(ValueError, match="runs over one axis"):
            sequence_layout(axis)


# Groups that come and go: DTensor keeps meshes of the past, and they find the groups of today.
#
# Within one run: between runs the pool clears the caches of DTensor that this is about.

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
