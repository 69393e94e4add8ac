"""The mesh of all ranks, from the sizes of its axes."""

from __future__ import annotations

from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring.extension import axis_group_options


def mesh_of_sizes(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return a mesh of all ranks whose axis `cp` has the options of a ring.

    Args:
        device_type: of the ranks, such as "cuda".
        sizes: the number of ranks of each axis, by its name.
    """
    options = axis_group_options(device_type)
    return init_device_mesh(
        device_type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=None if options is None else {"cp": options},
    )


def check_sizes(sizes: dict[str, int], what: str, advice: str) -> None:
    """Refuse sizes whose product is not the number of ranks.

    Args:
        sizes: the number of ranks of each axis, by its name.
        what: has these sizes, for the error.
        advice: ends the error.

    Raises:
        ValueError: on every rank, with the sizes and the number of ranks.
    """
    if prod(sizes.values()) != dist.get_world_size():
        listed = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"the {what} has {prod(sizes.values())} ranks ({listed}), and the launcher started "
            f"{dist.get_world_size()}; their product must be that number, {advice}"
        )
