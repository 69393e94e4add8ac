"""The parallel style that makes a module attend over a ring, `nn.MultiheadAttention` as well."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_ring.dtensor.annotation import annotation_of, axis_group, axis_mesh
from dtensor_ring.dtensor.axis import SequenceAxis
from dtensor_ring.dtensor.axis_config import check_axis_options
from dtensor_ring.dtensor.laboratory import AnyMachine
from dtensor_ring.dtensor.placement import SEQUENCE
from dtensor_ring.dtensor.sequence_tensor import from_equal_shards, from_local_tokens
from dtensor_ring.ops.checks import CALLER, check_strided, layer_of, name_layer, within_layer
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.transport.transport import TransferPolicy

INPUTS = ("query", "key", "value")

# Dims of a result that may be its sequence: the later ones are features.
MAX_SEQUENCE = 3


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
    of twice the number of ranks, or give `seq_len`, or pass DTensors, which know it. If the loss is
    the mean over a rank's tokens, or over those of all ranks (`sum_over_sequence`), gradients
    average over the axis, as over data-parallel ranks.

    PyTorch only warns of a pattern in the plan of `parallelize_module` that matches no module. Then
    nothing is a ring, and each rank attends to its own tokens: make that warning an error.

    Args:
        layout: the order in which the tokens are sharded; a layout or its spec.
        strategy: how attention is made parallel, see `SequenceAxis`.
        kernel: name of the block kernel.
        policy: the dtypes in which messages travel.
        machine: what the strategy "auto" simulates, see `SequenceAxis`.
        inputs: names of the arguments of `forward` that become DTensors.
        seq_len: tokens of the whole sequence, where ranks hold different numbers of them, as
            `shard_sequence` shards them; by default all hold the same number.

    Raises:
        TypeError: if an argument has a wrong type, or an input is not a tensor.
        ValueError: if a value is unknown, or `forward` has no arguments of these names; in
            `forward`, if the module returns the whole sequence, where it got a shard.

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
        machine: AnyMachine | None = None,
        inputs: tuple[str, ...] = INPUTS,
        seq_len: int | None = None,
    ) -> None:
        super().__init__()
        how: dict[str, Any] = {"strategy": strategy, "kernel": kernel, "policy": policy}
        how["machine"] = machine
        self.layout, self.how = as_layout(layout), how
        # Refuse options here, where the user wrote them, and not when the style is applied.
        check_axis_options(self.layout, **how)
        self.inputs = _names(inputs)
        self.seq_len = None if seq_len is None else as_count("seq_len", seq_len, 1)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.MultiheadAttention):
            if self.inputs != INPUTS:
                raise ValueError("nn.MultiheadAttention has inputs of its own; leave inputs out")
            axis = SequenceAxis(device_mesh, self.layout, **self.how)
            return shard_multihead(module, axis, self.seq_len)
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
        shard = partial(_shard, axis=axis, defaults=defaults, seq_len=self.seq_len)
        module.register_forward_pre_hook(
            partial(_shard_inputs, shard=shard, positions=positions, names=self.inputs),
            with_kwargs=True,
        )
        module.register_forward_hook(_local_outputs, with_kwargs=True)
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


def _shard(
    name: str, x: Any, *, axis: SequenceAxis, defaults: dict[str, Any], seq_len: int | None
) -> Any:
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
    if torch.compiler._is_exporting_flag:  # torch 2.11 compiles `is_exporting()` as true
        raise ValueError(
            "torch.export cannot make DTensors of local tensors, as ContextParallel does; call "
            "dtensor_ring.ring_attention(query, key, value, mesh=mesh) in the module instead"
        )
    if seq_len is not None:
        return from_local_tokens(x, axis.token_mesh, SEQUENCE, seq_len)
    return from_equal_shards(x, axis.token_mesh, SEQUENCE)


def _local_outputs(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    if not torch.compiler.is_compiling():
        CALLER.layer = ""
    sharded = [
        x
        for x in (*args, *kwargs.values())
        if isinstance(x, DTensor) and Shard(SEQUENCE) in x.placements
    ]
    if sharded:
        given = sharded[0]
        refuse = partial(_refuse_whole, type(module).__name__, given)
        torch.utils._pytree.tree_map_only(DTensor, refuse, output)
    # A lambda, because a compiler can trace `x.to_local()`, but not the unbound function.
    return torch.utils._pytree.tree_map_only(DTensor, lambda x: x.to_local(), output)


def _refuse_whole(name: str, given: DTensor, output: DTensor) -> None:
    """Refuse a result that has all tokens on each rank, which callers would take for a shard."""
    if axis_mesh(output.device_mesh) != axis_mesh(given.device_mesh):
        return
    axis = [where == Shard(SEQUENCE) for where in given.placements].index(True)
    where = output.placements[axis]
    is_whole = where.is_replicate() or where.is_partial()
    seq_len, is_ring = given.shape[SEQUENCE], given.device_mesh.size(axis) > 1
    # A summary without a dimension of this length, such as a pooled vector, is no sequence.
    if is_whole and is_ring and seq_len in output.shape[:MAX_SEQUENCE]:
        raise ValueError(
            f"{name} got shards of {seq_len} tokens and returned all of them, "
            f"{tuple(output.shape)}, on every rank of the ring: a result over all tokens, such as "
            "a mean, made the others whole, too; return tokens as they came, and combine them "
            "with such a result as it is, query + query.mean(2, keepdim=True)"
        )


NO_PADDING = (
    "leave it out where is_causal hides the padding after a sequence, else attend by "
    "dtensor_ring.ring_attention with cu_seqlens"
)
NO_MASK = (
    "pass is_causal=True if it is causal, else attend by dtensor_ring.ring_attention with a mask "
    "or slices"
)


class ShardedMultiheadAttention(nn.MultiheadAttention):
    """The class that `ContextParallel` gives to `nn.MultiheadAttention`; parameters stay."""

    axis: SequenceAxis
    seq_len: int | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with this rank's tokens, `(B, L, E)`, or `(L, B, E)` without `batch_first`.

        Args:
            query: local shard; likewise key and value.
            key: must have the same number of tokens on each rank, without `seq_len` of the style.
            value: must have the same number of tokens as the key.
            key_padding_mask: must be `None`.
            need_weights: must be `False`.
            attn_mask: ignored with `is_causal`; otherwise it must be `None`.
            average_attn_weights: ignored.
            is_causal: whether tokens see no later token of the whole sequence.

        Returns:
            The output, and `None`.

        Raises:
            ValueError: if attention over a sharded sequence cannot do what is asked.
        """
        # In inference, `nn.TransformerEncoder` turns a padding mask into a nested tensor.
        is_padded = key_padding_mask is not None or query.is_nested
        self._refuse(is_padded, need_weights, attn_mask is not None and not is_causal)
        inputs = query, key, value
        if any(isinstance(x, DTensor) for x in inputs):
            raise ValueError(
                "nn.MultiheadAttention under ContextParallel takes this rank's tokens, got "
                "DTensors; pass x.to_local()"
            )
        if any(x.ndim != 3 for x in inputs):
            raise ValueError(
                "query, key and value must be (B, L, E), or (L, B, E) without batch_first, got "
                f"{[x.ndim for x in inputs]} dims; add one to a sequence without a batch"
            )
        if not self.batch_first:
            inputs = tuple(x.transpose(0, 1) for x in inputs)
        weights, biases = self._projections()
        heads: Any = (
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        if self.seq_len is not None:
            on = self.axis.token_mesh
            heads = (from_local_tokens(x, on, SEQUENCE, self.seq_len) for x in heads)
        with within_layer(self):
            mask = Mask.causal() if is_causal else Mask.full()
            dropout_p = self.dropout if self.training else 0.0
            q, k, v = heads
            out = self.axis.attention(q, k, v, mask=mask, dropout_p=dropout_p)
        out = out.to_local() if isinstance(out, DTensor) else out
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return out if self.batch_first else out.transpose(0, 1), None

    def _projections(self) -> tuple[Any, Any]:
        """Return the weights and the biases of query, key and value."""
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        bias = self.in_proj_bias
        return weights, (None,) * 3 if bias is None else bias.chunk(3)

    def _refuse(self, is_padded: bool, need_weights: bool, is_masked: bool) -> None:
        for is_asked, what, instead in (
            (need_weights, "need_weights=True", "call it with need_weights=False"),
            (is_padded, "key_padding_mask", NO_PADDING),
            (is_masked, "attn_mask without is_causal", NO_MASK),
        ):
            if is_asked:
                raise ValueError(
                    f"nn.MultiheadAttention cannot serve {what} over a sharded sequence: {instead}"
                )


def shard_multihead(
    module: nn.MultiheadAttention, axis: SequenceAxis, seq_len: int | None = None
) -> nn.Module:
    """Make the module attend over an axis; `seq_len` as of `ContextParallel`.

    Raises:
        ValueError: if it is a subclass, or has keys that belong to no token.
    """
    if type(module) is not nn.MultiheadAttention:
        raise ValueError(
            f"ContextParallel serves nn.MultiheadAttention itself, got {type(module).__name__}, "
            "which extends it; apply it once, or to a module that takes (B, N, L, H)"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            "nn.MultiheadAttention cannot serve add_bias_kv or add_zero_attn over a sharded "
            "sequence: make it without them"
        )
    module.__class__ = ShardedMultiheadAttention
    vars(module).update(axis=axis, seq_len=seq_len)
    number_layer(module, axis.mesh)
    # In inference, the layers around it skip this module, unless one of their parts has a hook.
    module.register_forward_pre_hook(_no_fast_path)
    return module


def _no_fast_path(module: nn.Module, args: Any) -> None:
    """Do nothing; the presence of a hook turns the fast path off."""


def number_layer(module: nn.Module, mesh: DeviceMesh) -> None:
    """Name a module by its number among those that attend over a 1-D mesh.

    All ranks must make these modules in the same order, as they must call them.
    """
    here = annotation_of(axis_group(mesh))
    name_layer(module, f"{type(module).__name__} {here.num_layers}")
    here.num_layers += 1
