"""Rows of a tensor and states of layers, passed between the ranks of an axis."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.ops.rows_op import gather_rows_op
from dtensor_ring.ops.state import attached, receive_op, send_op


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
