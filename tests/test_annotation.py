"""A mesh axis has one layout, whichever mesh it is seen through."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import Contiguous, Striped, ZigZag, sequence_layout, set_sequence_layout
from tests.pool import Pool

SIZES, NAMES = (2, 2), ("dp", "cp")


def test_one_layout_per_axis(pool: Pool) -> None:
    pool.run(4, _check_one_layout)


def _check_one_layout() -> None:
    mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=NAMES)
    assert sequence_layout(mesh["cp"]) is None
    set_sequence_layout(mesh["cp"], "zigzag")
    set_sequence_layout(mesh["cp"], ZigZag())  # the same again
    assert sequence_layout(mesh["cp"]) == ZigZag()
    assert sequence_layout(mesh["dp"]) is None
    set_sequence_layout(mesh["dp"], Contiguous())
    assert sequence_layout(mesh["dp"]) == Contiguous()

    # DTensor may put an equal mesh in the place of this one.
    equal = init_device_mesh("cpu", SIZES, mesh_dim_names=NAMES)
    assert sequence_layout(equal["cp"]) == ZigZag()
    for axis in (mesh["cp"], equal["cp"]):
        with pytest.raises(ValueError, match="is annotated zigzag, it cannot become striped"):
            set_sequence_layout(axis, Striped())
    assert sequence_layout(mesh["cp"]) == ZigZag()


def test_forgotten_with_the_world(pool: Pool) -> None:
    for layout in ("zigzag", "striped"):
        pool.run(2, _check_forgotten, layout)  # in the same processes


def _check_forgotten(layout: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    assert sequence_layout(mesh) is None
    set_sequence_layout(mesh, layout)


REFUSALS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "two axes": (NAMES, "zigzag", ValueError, r'over one axis, got .*; pick .* mesh\["cp"\]'),
    "two axes without names": (None, "zigzag", ValueError, r"mesh_dim_names=\.\.\."),
    "unknown name": ("cp", "spiral", ValueError, "'spiral'; known layouts: contiguous, striped, z"),
    "no name": ("cp", 3, TypeError, "a layout is a Layout or its name, got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(pool: Pool, name: str) -> None:
    pool.run(4, _check_refusal, *REFUSALS[name])


def _check_refusal(axes: Any, layout: Any, error: type[Exception], message: str) -> None:
    mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=NAMES if axes else None)
    axis = mesh[axes] if isinstance(axes, str) else mesh
    with pytest.raises(error, match=message):
        set_sequence_layout(axis, layout)
    if axis.ndim == 1:
        assert sequence_layout(axis) is None
    else:
        with pytest.raises(ValueError, match="runs over one axis"):
            sequence_layout(axis)
