"""A mesh axis has one layout, whichever mesh it is seen through."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

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
from tests.meshes import SEQUENCE
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
