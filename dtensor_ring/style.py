"""Context parallelism of a module by annotation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_ring.dtensor import SEQUENCE
from dtensor_ring.layout import Layout, as_layout
from dtensor_ring.sdpa import set_sequence_layout

INPUTS = ("query", "key", "value")


class ContextParallel(ParallelStyle):
    """Makes a module whose `forward` takes query, key and value attend over a ring.

    The module gets local shards `(B, N, L, H)`, as all modules around it do. Inside, query, key
    and value are DTensors sharded in dimension 2, so its `F.scaled_dot_product_attention` or
    `ring_attention` rings; what it returns becomes local again.

    Args:
        layout: order in which the tokens are dealt; a layout or its name.
        inputs: names of the arguments that become DTensors, in the order of the signature.

    Raises:
        ValueError: if the layout is unknown; when the module runs, if shards differ in length.

    Example:
        >>> class Attention(nn.Module):
        ...     def forward(self, query, key, value):
        ...         return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> attention = parallelize_module(Attention(), mesh, ContextParallel("zigzag"))
        >>> attention(*(torch.randn(1, 2, 8, 4) for _ in range(3))).shape
        torch.Size([1, 2, 8, 4])
    """

    def __init__(
        self, layout: Layout | str = "zigzag", *, inputs: tuple[str, ...] = INPUTS
    ) -> None:
        super().__init__()
        self.layout = as_layout(layout)
        self.inputs = inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        set_sequence_layout(device_mesh, self.layout)
        module.register_forward_pre_hook(
            partial(_shard_inputs, mesh=device_mesh, names=self.inputs), with_kwargs=True
        )
        module.register_forward_hook(_local_outputs)
        return module


def _shard_inputs(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mesh: DeviceMesh,
    names: tuple[str, ...],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional = min(len(args), len(names))
    sharded = tuple(_shard(x, mesh) for x in args[:positional])
    named = {name: _shard(kwargs[name], mesh) for name in names[positional:] if name in kwargs}
    return (*sharded, *args[positional:]), kwargs | named


def _shard(x: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, [Shard(SEQUENCE)], run_check=False)


def _local_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    # A call by attribute: a compiler knows `x.to_local()`, and not the function itself.
    return torch.utils._pytree.tree_map_only(DTensor, lambda x: x.to_local(), output)
