"""States that layers hand over a mesh axis, from the rank with earlier tokens to the next one."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.ops.state import attached, receive_op, send_op


def receive_state(anchor: Tensor, rows: int, numbers: int, mesh: DeviceMesh) -> Tensor:
    """The state that the rank before this one sends by `send_state`; the first rank gets zeros.

    Args:
        anchor: the input of the layer. It decides dtype, device and when the backward runs, and
            gets no gradient by this.
        rows: rows of the batch.
        numbers: numbers of the state of a row.
        mesh: the axis; its ranks have the tokens in contiguous order.

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
        The same output. A layer has to return it, since its backward is what receives the
        gradient of the state.

    Raises:
        RingError: on every rank, if calls of ranks differ.
    """
    # Without it the two have no order in backward where a document begins in between: the state
    # sent does not depend on the one received.
    token = send_op(attached(state, received), 1, axis_group(mesh).group_name)
    return attached(output, token)
