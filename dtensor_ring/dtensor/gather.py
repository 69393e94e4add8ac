"""Sums and gathers over an axis, whose backward sums, and states from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from dtensor_ring.all_to_all.op import AllToAllArgs, BatchRuns, all_to_all_op, flatten_all_to_all
from dtensor_ring.balanced.balanced import Balanced
from dtensor_ring.compute.exact import tree_sum
from dtensor_ring.dtensor.annotation import annotation_of, axis_group, group_of
from dtensor_ring.ops.axis_ops import attached, gather_rows_op, receive_op, send_op, sum_ranks_op
from dtensor_ring.ops.checks import canonical, check_strided
from dtensor_ring.ops.nodes import refuse_tangents
from dtensor_ring.planning.layout import Contiguous, Layout, Padded


def sum_over_sequence(
    local: Tensor, mesh: DeviceMesh, dim: int | None = None, seq_len: int | None = None
) -> Tensor:
    """Sum a tensor over the ranks of the axis, such as the loss of each rank's tokens.

    Args:
        local: this rank's summand, with the same shape on all ranks; or with `dim` the summands of
            its tokens, such as the loss of each.
        mesh: the axis.
        dim: the dimension of the tokens, which are summed, too. Then the order of the sum depends
            on nothing but the length of the sequence, so its bits are the same on any number of
            ranks; all ranks gather the summands of all tokens.
        seq_len: the global length, for `dim` and local shards of different lengths.

    Returns:
        The sum, on every rank. Backward sums too, like that of `unshard_sequence`: if all ranks
        compute the same loss of it, gradients of parameters average over the axis.

    Raises:
        TypeError: if `local` is not a plain tensor.
        ValueError: if its dtype has no sum, or the layout of the axis belongs to a batch and `dim`
            is given.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> sum_over_sequence(torch.tensor(2.0), mesh)
        tensor(2.)
    """
    if not isinstance(local, Tensor) or isinstance(local, DTensor):
        raise TypeError(f"local must be this rank's plain tensor, got {type(local).__name__}")
    group = axis_group(mesh)
    check_strided("local", local)
    if dim is not None:
        dim, layout = (
            canonical(dim, "local", local),
            annotation_of(group).config_or_default.layout,
        )
        if layout.per_batch:
            raise ValueError(
                f"dim={dim} needs the order of the tokens, and the {layout.name} layout of this "
                "axis belongs to a batch; gather them by unshard_sequence"
            )
        length = local.shape[dim] * group.size() if seq_len is None else seq_len
        # A sum of each rank's sum would add in an order that depends on their number.
        return tree_sum(whole_sequence(local, dim, group, length, layout), dim)
    try:
        return sum_ranks_op(local, group.group_name)
    except NotImplementedError:
        refuse_tangents((local,))  # they are what is not implemented, if there are any
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
    """Gather the tokens of an axis in the order of their positions; backward sums over the axis.

    Args:
        local: this rank's tokens, in `dim`.
        dim: the dimension of the sequence, from the front.
        group: the group of the axis.
        seq_len: the global length in tokens.
        layout: the spec of the layout, `Layout.spec`.
        runs: the runs, for a layout that belongs to a batch, see `sequence_runs`.

    Raises:
        ValueError: if this rank's number of tokens is not that of the layout.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.
    """
    # Model the gather as an exchange with a single head that is replicated to all ranks.
    args = AllToAllArgs.of_tokens(
        batch_runs=BatchRuns(runs, runs),
        layout=layout,
        to=layout,
        heads=group.size(),
        seq_len=seq_len,
        group=group,
    )
    whole = all_to_all_tokens(local, dim, args)
    # A compiled graph defines all gradients by itself.
    return whole if torch.compiler.is_compiling() else _DefinedGradient.apply(whole)


def whole_sequence(
    local: Tensor, dim: int, group: ProcessGroup, seq_len: int, layout: Layout
) -> Tensor:
    """Gather the tokens of all ranks in their order; see `gathered` for arguments and errors."""
    length = seq_len
    if isinstance(layout, Padded):
        length, layout = layout.whole_length(seq_len, group.size()), layout.layout
        # Shards of an exchange have the lengths of the layout; padding is cut off at the end.
        missing = layout.num_tokens(group.rank(), group.size(), length) - local.shape[dim]
        # `pad` counts dims from the last one.
        local = F.pad(local, (0, 0) * (local.ndim - dim - 1) + (0, missing))
    spec, runs = layout.spec, None
    if isinstance(layout, Balanced):
        layout.runs(group.rank(), group.size(), length)  # refuses another length
        spec, runs = layout.name, sequence_runs(layout)
    whole = gathered(local, dim, group, length, spec, runs)
    return whole if length == seq_len else whole.narrow(dim, 0, seq_len)


def all_to_all_tokens(local: Tensor, dim: int, args: AllToAllArgs) -> Tensor:
    """Exchange the tokens in `dim` of a tensor of any shape."""
    before, (length, *after) = local.shape[:dim], local.shape[dim:]
    # Flatten to one head; all other dims of a token become its features.
    flat = local.reshape(prod(before), 1, length, prod(after))
    run: Any = all_to_all_op
    (result,) = run([flat], *flatten_all_to_all(args))
    return result.reshape((*before, result.shape[2], *after))


def whole_of(dtensor: DTensor, axis: int, local: Tensor) -> Tensor:
    """Return the global tensor, where `local` is already gathered over one axis of the mesh."""
    if dtensor.device_mesh.ndim == 1:
        return local
    mesh, placements = _mesh_in_use(dtensor.device_mesh), [*dtensor.placements]
    placements[axis] = Replicate()
    how = {"run_check": False, "shape": dtensor.shape, "stride": dtensor.stride()}
    gathered_here = DTensor.from_local(local, mesh, placements, **how)
    return gathered_here.full_tensor(grad_placements=[Replicate()] * mesh.ndim)


def _mesh_in_use(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh, or an equal one if the group of an axis was destroyed: see `group_of`."""
    if torch.compiler.is_compiling():
        return mesh
    groups = [group_of(mesh, axis) for axis in range(mesh.ndim)]
    if [group.group_name for group in groups] == [*mesh._dim_group_names]:
        return mesh
    names = {"mesh_dim_names": mesh.mesh_dim_names}
    return DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, **names)


class _DefinedGradient(torch.autograd.Function):
    """The identity, with a zero gradient where autograd has none.

    DDP gives no gradient to unused outputs, which the backward of a DTensor cannot handle.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # Autograd has already replaced a missing gradient by zeros.
        return grads[0]


def gather_rows(part: Tensor, rows: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Concatenate the rows of all ranks of a 1-D mesh, in the order of the ranks.

    Args:
        part: this rank's rows, `(rows[rank], H)`; there may be none.
        rows: how many rows each rank has.
        mesh: the axis.

    Returns:
        `(sum(rows), H)`, on every rank. Backward sums the gradients of all ranks.

    Raises:
        RingError: on every rank, if they differ in the rows, the width or the dtype.
    """
    return gather_rows_op(part, rows, mesh.get_local_rank(), axis_group(mesh).group_name)


def receive_state(anchor: Tensor, rows: int, numbers: int, mesh: DeviceMesh) -> Tensor:
    """Receive the state that the previous rank sends by `send_state`; the first rank gets zeros.

    Args:
        anchor: the input of the layer. It decides dtype, device and when the backward runs, and
            gets no gradient from this.
        rows: the number of batch rows.
        numbers: the size of a row's state.
        mesh: the axis; its ranks must hold the tokens in contiguous order.

    Returns:
        `(rows, numbers)`, float32 or wider. Backward sends its gradient to the rank before.

    Raises:
        RingError: on every rank, if calls of ranks differ.
    """
    return receive_op(anchor, rows, numbers, 1, axis_group(mesh).group_name)


def send_state(state: Tensor, output: Tensor, mesh: DeviceMesh, *, received: Tensor) -> Tensor:
    """Send the state after this rank's tokens to the next rank, if there is one.

    Args:
        state: `(rows, numbers)`, in the dtype of `received`.
        output: the output of the layer.
        mesh: the axis.
        received: what `receive_state` returned in this layer.

    Returns:
        The same output. A layer must return it: its backward receives the gradient of the state.

    Raises:
        RingError: on every rank, if calls of ranks differ.
    """
    # If a document begins on this rank, the sent state does not depend on the received one.
    # `attached` then still orders the two in backward.
    token = send_op(attached(state, received), 1, axis_group(mesh).group_name)
    return attached(output, token)


def sequence_runs(layout: Balanced) -> Tensor:
    """Return the runs of a layout that belongs to one batch, as `ring_attention` takes them.

    Returns:
        `(W, R, 2)`, int32, on the CPU: start and length, in tokens, of the runs of each rank,
        padded with empty runs. R is the largest number of runs for this length, world size and
        block, so that other documents do not recompile a graph.

    Raises:
        TypeError: if the layout is not `Balanced`: other layouts need no runs.

    Example:
        >>> layout = Balanced(Mask.causal(), seq_len=8, world_size=2, block=4)
        >>> sequence_runs(layout).tolist()
        [[[0, 2], [6, 2]], [[2, 4], [0, 0]]]
    """
    check_balanced(layout)
    world_size, table = layout.world_size, []
    for rank in range(world_size):
        sharded = layout.runs(rank, world_size, layout.seq_len)
        # Padding gives all batches one shape, so that a graph is compiled once.
        filling = [(0, 0)] * (layout.max_runs - len(sharded))
        table.append([(run.start, run.length) for run in sharded] + filling)
    runs = torch.tensor(table, dtype=torch.int32, device="cpu")
    return runs.view(world_size, layout.max_runs, 2)


def check_balanced(layout: Any) -> None:
    """Refuse what is no `Balanced` layout."""
    if not isinstance(layout, Balanced):
        raise TypeError(
            f"only a Balanced layout is passed with its batch, got {layout!r}; of any other, the "
            "mesh knows: leave it out"
        )
