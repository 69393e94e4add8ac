"""Gathers and sums over an axis whose backward sums, so that gradients average over the axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dtensor_ring.dtensor.annotation import axis_group, group_of
from dtensor_ring.ops.check import check_strided


def sum_over_sequence(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of a tensor of each rank over the axis, such as the loss of its tokens.

    Args:
        local: of one shape on all ranks.
        mesh: the axis.

    Returns:
        The sum, on every rank. Backward sums too, as that of `unshard_sequence`: if all ranks
        compute one loss of it, gradients of parameters average over the axis.

    Raises:
        TypeError: if `local` is not a plain tensor.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> sum_over_sequence(torch.tensor(2.0), mesh)
        tensor(2.)
    """
    if not isinstance(local, Tensor) or isinstance(local, DTensor):
        raise TypeError(f"local must be this rank's plain tensor, got {type(local).__name__}")
    check_strided("local", local)
    axis_group(mesh)  # which checks that it is one axis
    # Gathered and then summed, for the backward of a gather.
    parts = DTensor.from_local(local.unsqueeze(0), mesh, [Shard(0)], run_check=False)
    try:
        return gathered(parts, 0).sum(0)
    except NotImplementedError:
        raise ValueError(
            f"local must have a dtype that PyTorch sums, got {local.dtype}; use .float()"
        ) from None


def on_groups_in_use(dtensor: DTensor, group: ProcessGroup, axis: int) -> DTensor:
    """The tensor, on another mesh if the group of this axis was destroyed: see `group_of`."""
    mesh = dtensor.device_mesh
    if torch.compiler.is_compiling() or mesh._dim_group_names[axis] == group.group_name:
        return dtensor
    groups = [group_of(mesh, other) for other in range(mesh.ndim)]
    names = {"mesh_dim_names": mesh.mesh_dim_names}
    if mesh.ndim == 1:
        in_use = DeviceMesh.from_group(groups[0], mesh.device_type, **names)
    else:
        in_use = DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, **names)
    how = {"run_check": False, "shape": dtensor.shape, "stride": dtensor.stride()}
    return DTensor.from_local(dtensor.to_local(), in_use, dtensor.placements, **how)


def gathered(dtensor: DTensor, axis: int) -> Tensor:
    """The global tensor, whose gradient is summed over one axis of the mesh."""
    placements: list[Placement] = [Replicate()] * dtensor.device_mesh.ndim
    placements[axis] = Partial()
    try:
        whole = dtensor.full_tensor(grad_placements=placements)
    except RuntimeError as error:
        if "scalar type" not in str(error):
            raise
        raise ValueError(
            f"the process group cannot gather {dtensor.dtype} ({error}); use .to() of another dtype"
        ) from error
    # A compiled graph defines its gradients itself.
    return whole if torch.compiler.is_compiling() else _DefinedGradient.apply(whole)


class _DefinedGradient(torch.autograd.Function):
    """The identity, whose gradient is zero where autograd has none.

    DDP gives no gradient to outputs that nobody used, which the backward of a DTensor cannot take.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # Autograd has made zeros of what it lacks.
        return grads[0]
