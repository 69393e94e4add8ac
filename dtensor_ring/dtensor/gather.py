"""Gathers and sums over an axis whose backward sums, so that gradients average over the axis."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dtensor_ring.dtensor.annotation import axis_group, group_of
from dtensor_ring.ops.autograd import exchange_op
from dtensor_ring.ops.check import check_strided
from dtensor_ring.ops.exchange_options import Dealt, Trade, flatten_trade
from dtensor_ring.ops.parts import sum_ranks_op
from dtensor_ring.planning.layout import Contiguous


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
        ValueError: if its dtype has no sum.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> sum_over_sequence(torch.tensor(2.0), mesh)
        tensor(2.)
    """
    if not isinstance(local, Tensor) or isinstance(local, DTensor):
        raise TypeError(f"local must be this rank's plain tensor, got {type(local).__name__}")
    check_strided("local", local)
    group = axis_group(mesh)
    try:
        return sum_ranks_op(local, group.group_name)
    except NotImplementedError:
        raise ValueError(
            f"local must have a dtype that PyTorch sums, got {local.dtype}; use .float()"
        ) from None


def gathered(
    local: Tensor,
    dim: int,
    group: ProcessGroup,
    seq_len: int,
    layout: str = Contiguous.name,
    runs: Tensor | None = None,
) -> Tensor:
    """All tokens of an axis in the order of their positions; the gradient is summed over it.

    Args:
        local: this rank's tokens, in `dim`.
        dim: the dimension of the sequence, from the front.
        group: of the axis.
        seq_len: tokens of all ranks.
        layout: how they are dealt, as `Layout.spec` says it.
        runs: if that belongs to a batch, see `sequence_runs`.

    Raises:
        ValueError: if this rank has another number of tokens.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.
    """
    # One head, of which each rank gets a copy: then what each has comes to all.
    trade = Trade(
        *(Dealt(runs, runs), layout, layout, group.size(), (1,), 1, seq_len, None),
        group.group_name,
        is_compiled=torch.compiler.is_compiling(),
    )
    whole = exchanged(local, dim, trade)
    # A compiled graph defines its gradients itself.
    return whole if torch.compiler.is_compiling() else _DefinedGradient.apply(whole)


def exchanged(local: Tensor, dim: int, trade: Trade) -> Tensor:
    """A tensor of any shape after an exchange of the tokens in `dim`."""
    before, (length, *after) = local.shape[:dim], local.shape[dim:]
    # As one head, with whatever belongs to a token as its features.
    flat = local.reshape(prod(before), 1, length, prod(after))
    run: Any = exchange_op
    (result,) = run([flat], *flatten_trade(trade))
    return result.reshape(*before, result.shape[2], *after)


def whole_of(dtensor: DTensor, axis: int, local: Tensor) -> Tensor:
    """The global tensor, of which `local` has all that is sharded over one axis of the mesh."""
    if dtensor.device_mesh.ndim == 1:
        return local
    mesh, placements = _mesh_in_use(dtensor.device_mesh), [*dtensor.placements]
    placements[axis] = Replicate()
    how = {"run_check": False, "shape": dtensor.shape, "stride": dtensor.stride()}
    gathered_here = DTensor.from_local(local, mesh, placements, **how)
    return gathered_here.full_tensor(grad_placements=[Replicate()] * mesh.ndim)


def _mesh_in_use(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh, or another one if the group of an axis was destroyed: see `group_of`."""
    if torch.compiler.is_compiling():
        return mesh
    groups = [group_of(mesh, axis) for axis in range(mesh.ndim)]
    if [group.group_name for group in groups] == [*mesh._dim_group_names]:
        return mesh
    names = {"mesh_dim_names": mesh.mesh_dim_names}
    return DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, **names)


class _DefinedGradient(torch.autograd.Function):
    """The identity, whose gradient is zero where autograd has none.

    DDP gives no gradient to outputs that nobody used, which the backward of a DTensor cannot take.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # Autograd has made zeros of what it lacks.
        return grads[0]
