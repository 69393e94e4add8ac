"""Names the modules that attend over an axis, so that ranks can distinguish their calls."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.dtensor.annotation import annotation_of, axis_group
from dtensor_ring.ops.call_site import name_layer


def number_layer(module: nn.Module, mesh: DeviceMesh) -> None:
    """Name a module by its number among those that attend over a 1-D mesh.

    All ranks must make these modules in the same order, as they must call them.
    """
    here = annotation_of(axis_group(mesh))
    name_layer(module, f"{type(module).__name__} {here.num_layers}")
    here.num_layers += 1
