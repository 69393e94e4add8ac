"""Which layout the tokens sharded over a mesh axis are in."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.balanced import Balanced
from dtensor_ring.layout import Contiguous, Layout, as_layout


class Known(NamedTuple):
    """What is known of an axis."""

    name: str
    """Of the order that its tokens are in."""
    annotated: Layout | None = None
    """With what; or else it was used as if so."""

    def __str__(self) -> str:
        how = "is annotated" if self.annotated else "was used unannotated, which makes it"
        return f"{how} {self.name}"


_KNOWN: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Known]] = WeakKeyDictionary()
"""By the ranks of the axis, in their order; forgotten when the world they count in is.

Not by mesh or group: DTensor takes meshes of the same ranks for one, and puts either in place of
the other.
"""


def annotate(mesh: DeviceMesh, layout: Layout | str) -> None:
    """Remember the layout of a 1-D mesh; of the Balanced ones of its batches, the last.

    Raises:
        ValueError: if the mesh is not 1-D, the layout unknown, or another than before on more than
            one rank.
    """
    chosen = layout if isinstance(layout, Balanced) else as_layout(layout)
    ranks = _ranks(axis_group(mesh))
    axes = _KNOWN.setdefault(_world(), {})
    known = axes.get(ranks)
    if known is not None and _contradict(known.name, chosen.name, ranks):
        again = "use the same layout, or a mesh of other ranks"
        raise ValueError(
            f"{mesh} {known}, it cannot become {chosen.name}: tensors may already be sharded in "
            f"that order; {again if known.annotated else 'annotate it first'}"
        )
    axes[ranks] = Known(chosen.name, chosen)


def _contradict(one: str, other: str, ranks: tuple[int, ...]) -> bool:
    """Whether tokens cannot be in both orders; a single rank has them in their own, in each."""
    belongs_to_batch = Balanced.name in (one, other)
    return one != other and (len(ranks) > 1 or belongs_to_batch)


def sequence_layout(mesh: DeviceMesh) -> Layout | None:
    """The layout a 1-D mesh was annotated with, `None` if it was not.

    Raises:
        ValueError: if the mesh has more axes, or this rank is none of it.
        TypeError: if it is no mesh.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> sequence_layout(mesh)
        >>> set_sequence_layout(mesh, "striped")
        >>> sequence_layout(mesh)
        Striped()
    """
    return group_layout(axis_group(mesh))


def group_layout(group: ProcessGroup) -> Layout | None:
    """The layout of the axis that this group spans, `None` if it was not annotated."""
    known = known_axis(group)
    return None if known is None else known.annotated


def assumed_layout(group: ProcessGroup) -> Layout:
    """The layout of the axis; contiguous, and for good, if it was not annotated before its use."""
    layout = group_layout(group) or Contiguous()
    _note_use(group, layout.name)
    return layout


def axis_layout(group: ProcessGroup, with_runs: bool) -> str:
    """Name of the axis's layout, as the op takes it; with runs, the axis leaves it to them.

    Raises:
        ValueError: if the axis needs the runs of a batch and there are none, or the opposite.
    """
    known = known_axis(group)
    belongs_to_batch = known is not None and known.name == Balanced.name
    if with_runs and known is not None and not belongs_to_batch:
        raise ValueError(
            f"the axis {known}, so its tokens are in that order: leave runs out, or annotate the "
            "axis, before its first use, with the Balanced layout of a batch"
        )
    if belongs_to_batch and not with_runs:
        raise ValueError(
            f"the axis {known}, so the order of its tokens belongs to a batch: call "
            "ring_attention(..., runs=sequence_runs(layout)), no other attention can take it"
        )
    if known is not None:
        return known.name
    if not with_runs:
        return assumed_layout(group).name
    _note_use(group, Balanced.name)
    return Balanced.name


def _note_use(group: ProcessGroup, name: str) -> None:
    if known_axis(group) is None:
        _KNOWN.setdefault(_world(), {})[_ranks(group)] = Known(name)


def known_axis(group: ProcessGroup) -> Known | None:
    """What is known of the axis that this group spans."""
    return _KNOWN.get(_world(), {}).get(_ranks(group))


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "a mesh has a world"
    return world


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def axis_group(mesh: DeviceMesh) -> ProcessGroup:
    """The group of a 1-D mesh.

    Raises:
        ValueError: if the mesh has more axes, of which `mesh["cp"]` picks one, or not this rank.
        TypeError: if it is no mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        pick = (
            f'mesh["{names[-1]}"]' if names else 'init_device_mesh(..., mesh_dim_names=...)["cp"]'
        )
        raise ValueError(f"a ring runs over one axis, got {mesh}; pick one as in {pick}")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"this rank, {dist.get_rank()}, is not part of {mesh}: it has no ring there"
        )
    return mesh.get_group()
