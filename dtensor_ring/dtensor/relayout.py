"""Moves the tokens of a sharded tensor from one layout to another."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.balanced.balanced import Balanced
from dtensor_ring.dtensor.annotation import annotation_of, axis_group, group_of
from dtensor_ring.dtensor.gather import exchanged
from dtensor_ring.dtensor.sequence import canonical, sequence_runs
from dtensor_ring.ops.caller import called_from
from dtensor_ring.ops.check import check_strided
from dtensor_ring.ops.exchange_options import Dealt, Trade
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.planning.run_table import PerBatch, as_layout


def relayout(
    tensor: Tensor,
    mesh: DeviceMesh,
    dim: int,
    to: Layout | str = Contiguous.name,
    *,
    layout: Layout | str | None = None,
    seq_len: int | None = None,
) -> Tensor:
    """Reshard the tokens of a sharded tensor in the order of another layout.

    For models whose convolutions or recurrent layers need neighbouring tokens on one rank, while
    attention needs a balanced layout. Only tokens that change their rank travel, in one message
    per pair of ranks. Differentiable: backward sends the gradients back.

    Args:
        tensor: a local shard with this rank's tokens in `dim`, of any number of dimensions; or a
            DTensor that is `Shard(dim)` over the axis, with any placements over other axes.
        mesh: the 1-D mesh of the axis. Its annotation does not change: attention still takes
            tokens in that layout.
        dim: the dimension of the sequence.
        to: the new layout; a layout or its spelling, or the `Balanced` layout of this batch.
        layout: the present layout; by default that of the mesh, contiguous if it has none.
        seq_len: the global length, for local shards of different lengths.

    Returns:
        A tensor of the same kind, or the tensor itself if both layouts are the same. A DTensor has
        the same placements: they do not say the order, and `unshard_sequence` assumes that of the
        mesh.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if a layout cannot shard the length or belongs to another batch, or the DTensor
            has other placements.
        IndexError: if the tensor has no such dimension.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> axis = SequenceAxis(mesh, "zigzag")
        >>> hidden = torch.randn(2, 8, 16)  # (B, L, features), in zigzag order
        >>> in_order = relayout(hidden, mesh, 1)
        >>> back = relayout(in_order, mesh, 1, "zigzag", layout="contiguous")
        >>> torch.equal(back, hidden)
        True
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a tensor or a DTensor, got {type(tensor).__name__}")
    check_strided("tensor", tensor)
    group, dim = axis_group(mesh), canonical(dim, "tensor", tensor)
    if isinstance(tensor, DTensor):
        _check_placed(tensor, dim, group, seq_len)
        local, length = tensor.to_local(), tensor.shape[dim]
    else:
        local, length = tensor, tensor.shape[dim] * group.size()
    if seq_len is not None:
        length = as_count("seq_len", seq_len)
    now = _of_axis(group) if layout is None else layout
    before, after = _side("layout", now, length, group), _side("to", to, length, group)
    if before.layout == after.layout:
        return tensor
    trade = Trade(
        *(Dealt(before.runs, after.runs), before.spec, after.spec, 1, (1,), 1, length, None),
        group.group_name,
        is_compiled=torch.compiler.is_compiling(),
    )
    if torch.compiler.is_compiling():
        result = exchanged(local, dim, trade)
    else:
        result = called_from(sys._getframe(), exchanged, local, dim, trade)
    if not isinstance(tensor, DTensor):
        return result
    return DTensor.from_local(
        *(result, tensor.device_mesh, tensor.placements),
        **{"run_check": False, "shape": tensor.shape, "stride": tensor.stride()},
    )


def _of_axis(group: ProcessGroup) -> Layout:
    """Return the layout of the axis; refuse one of a batch, which may not be this batch."""
    layout = annotation_of(group).config_or_default.layout
    return PerBatch() if layout.per_batch else layout


class _Side(NamedTuple):
    """A layout in the form that the op takes."""

    layout: Layout
    runs: Tensor | None

    @property
    def spec(self) -> str:
        return self.layout.name if self.layout.per_batch else self.layout.spec


def _side(name: str, given: Any, seq_len: int, group: ProcessGroup) -> _Side:
    """Convert the argument `name` to a layout for the op.

    Raises:
        TypeError: if it is not a layout.
        ValueError: if it is unknown, or belongs to another batch.
    """
    try:
        layout = as_layout(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be a layout: {error}") from None
    if not layout.per_batch:
        return _Side(layout, None)
    if not isinstance(layout, Balanced):
        raise ValueError(
            f"{name} belongs to a batch, so it must be the Balanced layout of this one, got {given}"
        )
    if (layout.seq_len, layout.world_size) != (seq_len, group.size()):
        raise ValueError(
            f"{name} must deal the {seq_len} tokens to {group.size()} ranks, but this Balanced one "
            f"deals {layout.seq_len} to {layout.world_size}"
        )
    return _Side(layout, sequence_runs(layout))


def _check_placed(tensor: DTensor, dim: int, group: ProcessGroup, seq_len: int | None) -> None:
    """Refuse a DTensor that is not sharded in `dim` over the axis, and nowhere else."""
    if seq_len is not None:
        raise ValueError("seq_len is for local shards, and tensor is a DTensor, which has its own")
    mesh = tensor.device_mesh
    axes = [axis for axis, where in enumerate(tensor.placements) if where == Shard(dim)]
    # Meshes over the same ranks are one axis, even with different groups.
    if len(axes) != 1 or annotation_of(group_of(mesh, axes[0])) is not annotation_of(group):
        raise ValueError(
            f"tensor must be Shard({dim}) over the axis of mesh and no other, got "
            f"{tuple(tensor.placements)} on {mesh}"
        )
