"""Gathers rows that the ranks of a mesh axis have computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.ops.parts import gather_parts_op


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
    return gather_parts_op(part, rows, mesh.get_local_rank(), axis_group(mesh).group_name)
