"""The parallel style that makes a module attend over a ring."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_ring.dtensor.axis import SequenceAxis
from dtensor_ring.dtensor.axis_config import check_axis_options
from dtensor_ring.dtensor.layer import number_layer
from dtensor_ring.dtensor.multihead import shard_multihead
from dtensor_ring.dtensor.placement import SEQUENCE
from dtensor_ring.ops.call_site import CALLER, layer_of
from dtensor_ring.ops.checks import check_strided
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.transport.policy import TransferPolicy

INPUTS = ("query", "key", "value")


class ContextParallel(ParallelStyle):
    """Makes a module whose `forward` takes query, key and value attend over a ring.

    The module gets local shards `(B, N, L, H)`, as all modules around it do. Inside, query, key
    and value are DTensors sharded in dimension 2, so its `F.scaled_dot_product_attention` or
    `ring_attention` runs over the axis. Its outputs become local again.

    `nn.MultiheadAttention` takes and returns its own shape, `(B, L, E)` or `(L, B, E)`, and applies
    `is_causal` to the whole sequence. In `nn.TransformerEncoderLayer` and similar layers, apply the
    style to this submodule.

    All data of a token must be sharded in the same order: tokens, labels, and the positions of
    rotary embeddings, as in `shard_sequence(torch.arange(S), mesh, 0).to_local()`, after
    `parallelize_module`. Shards must have equal length on all ranks: pad the sequence to a multiple
    of twice the number of ranks. If the loss is the mean over a rank's tokens, or over those of all
    ranks (`sum_over_sequence`), gradients average over the axis, as over data-parallel ranks.

    Args:
        layout: the order in which the tokens are sharded; a layout or its spec.
        strategy: how attention is made parallel, see `SequenceAxis`.
        kernel: name of the block kernel.
        policy: the dtypes in which messages travel.
        inputs: names of the arguments of `forward` that become DTensors.

    Raises:
        TypeError: if an argument has a wrong type, or an input is not a tensor.
        ValueError: if a value is unknown, or `forward` has no arguments of these names.

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
        self,
        layout: Layout | str = "zigzag",
        *,
        strategy: str | None = None,
        kernel: str | None = None,
        policy: TransferPolicy | None = None,
        inputs: tuple[str, ...] = INPUTS,
    ) -> None:
        super().__init__()
        how = {"strategy": strategy, "kernel": kernel, "policy": policy}
        self.layout, self.how = as_layout(layout), how
        # Refuse options here, where the user wrote them, and not when the style is applied.
        check_axis_options(self.layout, **how)
        self.inputs = _names(inputs)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.MultiheadAttention):
            if self.inputs != INPUTS:
                raise ValueError("nn.MultiheadAttention has inputs of its own; leave inputs out")
            return shard_multihead(module, SequenceAxis(device_mesh, self.layout, **self.how))
        _check_parts(module)
        parameters = signature(module.forward).parameters
        # A forward with `*args` or `**kwargs` may take the inputs, too.
        is_open = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())
        if not (is_open or set(self.inputs) <= set(parameters)):
            raise ValueError(
                f"{type(module).__name__}.forward takes {list(parameters)}, not all of "
                f"{list(self.inputs)}; say which of its arguments are query, key and value: "
                "inputs=(...)"
            )
        axis = SequenceAxis(device_mesh, self.layout, **self.how)
        number_layer(module, device_mesh)
        positions = _positions(parameters.values(), self.inputs)
        defaults = {name: p.default for name, p in parameters.items()}
        shard = partial(_shard, axis=axis, defaults=defaults)
        module.register_forward_pre_hook(
            partial(_shard_inputs, shard=shard, positions=positions, names=self.inputs),
            with_kwargs=True,
        )
        module.register_forward_hook(_local_outputs)
        return module


def _check_parts(module: nn.Module) -> None:
    """Refuse a module whose attention is a submodule."""
    found = [name for name, x in module.named_modules() if isinstance(x, nn.MultiheadAttention)]
    if found:
        raise ValueError(
            f"{type(module).__name__} attends by {found}, nn.MultiheadAttention in it: apply "
            "ContextParallel to those"
        )


def _names(inputs: Any) -> tuple[str, ...]:
    """Return the names of inputs as a tuple."""
    is_listed = isinstance(inputs, Collection) and not isinstance(inputs, (str, Tensor))
    if not is_listed or not inputs or not all(isinstance(name, str) for name in inputs):
        raise TypeError(f"inputs must be names of arguments, such as {INPUTS}, got {inputs!r}")
    return tuple(inputs)


def _positions(parameters: Iterable[Parameter], inputs: tuple[str, ...]) -> dict[int, str]:
    """Return the index of each input among positional arguments.

    Inputs that `*args` takes follow the named ones; if none is named, they come first.
    """
    kinds = {p.name: p.kind for p in parameters}
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, kind in kinds.items() if kind in by_position]
    found = {names.index(name): name for name in inputs if name in names}
    unnamed = [name for name in inputs if name not in kinds]
    if Parameter.VAR_POSITIONAL in kinds.values():
        first = len(names) if found else 0
        found |= dict(enumerate(unnamed, first))
    return found


def _shard_inputs(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    shard: Callable[[str, Any], Any],
    positions: dict[int, str],
    names: tuple[str, ...],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not torch.compiler.is_compiling():  # a name in the graph would compile each layer separately
        CALLER.layer = layer_of(module)
    sharded = tuple(shard(positions[i], x) if i in positions else x for i, x in enumerate(args))
    named = {name: shard(name, kwargs[name]) for name in names if name in kwargs}
    if not named and not any(i in positions for i in range(len(args))):
        raise ValueError(
            f"{type(module).__name__} was called without any of {list(names)}, so nothing would be "
            "a ring; say which of its arguments are query, key and value: inputs=(...)"
        )
    return sharded, kwargs | named


def _shard(name: str, x: Any, *, axis: SequenceAxis, defaults: dict[str, Any]) -> Any:
    if not isinstance(x, Tensor):
        # Optional inputs may be given as their default, and unnamed ones may be anything.
        if x is defaults.get(name, x):
            return x
        raise TypeError(
            f"{name} must be a tensor or a DTensor, for ContextParallel to shard, got "
            f"{type(x).__name__}; say which arguments are query, key and value: inputs=(...)"
        )
    check_strided(name, x)
    if isinstance(x, DTensor):
        # Already sharded by another style, such as heads by tensor parallelism.
        if Shard(SEQUENCE) not in x.placements:
            raise ValueError(
                f"{name}, a DTensor, must be Shard({SEQUENCE}) over a mesh with the axis of the "
                f"ring, got {tuple(x.placements)} on {x.device_mesh}; or pass the "
                "local shard"
            )
        return x
    if x.ndim != 4:
        raise ValueError(f"{name} must be (B, N, L, H), got shape {tuple(x.shape)}")
    if torch.compiler.is_exporting():
        raise ValueError(
            "torch.export cannot make DTensors of local tensors, as ContextParallel does; call "
            "dtensor_ring.ring_attention(query, key, value, mesh=mesh) in the module instead"
        )
    # No check: comparing shapes over the ranks would cost a collective for each tensor.
    return DTensor.from_local(x, axis.mesh, [Shard(SEQUENCE)], run_check=False)


def _local_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    if not torch.compiler.is_compiling():
        CALLER.layer = ""
    # A lambda, because a compiler can trace `x.to_local()`, but not the unbound function.
    return torch.utils._pytree.tree_map_only(DTensor, lambda x: x.to_local(), output)
