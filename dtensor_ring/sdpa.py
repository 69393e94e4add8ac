"""Makes `F.scaled_dot_product_attention` on DTensors over an annotated mesh a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.annotation import annotate, group_layout
from dtensor_ring.dtensor import SEQUENCE, backward, bind, forward
from dtensor_ring.layout import Layout
from dtensor_ring.mask import Mask
from dtensor_ring.op import Options, default_scale

aten = torch.ops.aten

FORWARD_OPS = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten.scaled_dot_product_attention.default,  # seen as such in inference mode
)
BACKWARD_OPS = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
UNFUSED_OP = aten._safe_softmax.default  # only the unfused attention calls it
MASKING_OPS = (aten.add.Tensor, aten.add_.Tensor)  # where it adds a causal mask, a plain tensor
UNFUSED = (
    "scaled_dot_product_attention over a sharded sequence needs one of the fused kernels, and "
    "PyTorch chose its unfused one here, as it does for dropout_p > 0, head dims that differ, or a "
    "sdpa_kernel context without flash; without dropout, dtensor_ring.ring_attention takes what "
    "its kernels take"
)

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def set_sequence_layout(mesh: DeviceMesh, layout: Layout | str) -> None:
    """Annotate a 1-D mesh: sequences sharded over it are in this layout, and attention rings.

    Annotate before the first tensor is sharded over the axis. From then on
    `torch.nn.functional.scaled_dot_product_attention` on DTensors whose dimension 2 is sharded over
    this axis, of this mesh or of the one it was sliced from, is ring attention. `attn_mask` and
    dropout are refused. Tokens have to be dealt in this order, as `shard_sequence` does:
    `distribute_tensor` and `redistribute` know contiguous shards only.

    Args:
        mesh: a 1-D mesh, or one axis of a larger one, as `mesh["cp"]`.
        layout: a layout or its name: "contiguous", "striped" or "zigzag"; or the `Balanced` one of
            a batch, whose attention is `ring_attention(..., runs=...)` only.

    Raises:
        TypeError: if the mesh or the layout is none.
        ValueError: if the mesh is not 1-D, the layout unknown, or another was set before for a ring
            of these ranks.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> set_sequence_layout(mesh, "zigzag")
        >>> sequence_layout(mesh)
        ZigZag()
    """
    annotate(mesh, layout)
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for ops, make in (
        (FORWARD_OPS, _forward_handler),
        (BACKWARD_OPS, _backward_handler),
        ((UNFUSED_OP,), _unfused_handler),
        (MASKING_OPS, _masking_handler),
    ):
        for op in ops:
            if getattr(handlers.get(op), "rings", False):
                continue
            handlers[op] = handler = make(handlers.get(op))
            handler.rings = True  # pyrefly: ignore[missing-attribute]


def _forward_handler(previous: Handler | None) -> Handler:
    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = bind(op, args, kwargs)
        query, key, value = bound["query"], bound["key"], bound["value"]
        if not any(_on_annotated_axis(x, x.ndim - 2) for x in (query, key, value)):
            return _as_before(previous, op, args, kwargs)
        _refuse(bound)
        if query.ndim != 4:  # only the composite op takes these: its parts come back here
            return op.decompose(*args, **kwargs)
        out, lse = forward(query, key, value, _options(bound))
        return _like_returns(op, out, lse)

    return handle


def _backward_handler(previous: Handler | None) -> Handler:
    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = bind(op, args, kwargs)
        query, key, value = bound["query"], bound["key"], bound["value"]
        if not _on_annotated_axis(query, SEQUENCE):
            return _as_before(previous, op, args, kwargs)
        grad_out = bound["grad_out_"] if "grad_out_" in bound else bound["grad_out"]
        tensors = (query, key, value, bound["out"], bound["logsumexp"])
        *grads, _ = backward(grad_out, None, *tensors, _options(bound))
        return (*grads, None)[: len(op._schema.returns)]

    return handle


def _unfused_handler(previous: Handler | None) -> Handler:
    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scores = args[0]
        if any(_on_annotated_axis(scores, scores.ndim - dim) for dim in (1, 2)):
            raise ValueError(UNFUSED)
        return _as_before(previous, op, args, kwargs)

    return handle


def _masking_handler(previous: Handler | None) -> Handler:
    """Explains what DTensor would refuse as a mix of tensors; all else goes the usual way."""

    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 2 and _is_masking(*args):
            raise ValueError(UNFUSED)
        if previous is not None:
            return previous(op, args, kwargs)
        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        installed = handlers.pop(op, None)  # so that DTensor takes its fast path
        try:
            return op(*args, **kwargs)
        finally:
            if installed is not None:  # this handler, or one around it; else a thread took it out
                handlers[op] = installed

    return handle


def _is_masking(scores: Any, other: Any) -> bool:
    return (
        isinstance(scores, DTensor)
        and isinstance(other, Tensor)
        and not isinstance(other, DTensor)
        and other.shape == scores.shape[-2:]
        and _on_annotated_axis(scores, scores.ndim - 2)
    )


def _on_annotated_axis(x: Any, dim: int) -> bool:
    """Whether `x` is sharded in that dimension over an axis that has a layout."""
    is_here = isinstance(x, DTensor) and x.device_mesh.get_coordinate() is not None
    return is_here and any(
        where == Shard(dim) and group_layout(x.device_mesh.get_group(axis)) is not None
        for axis, where in enumerate(x.placements)
    )


def _as_before(
    previous: Handler | None, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What DTensor does without this module: the steps of its own dispatch."""
    if previous is not None:
        return previous(op, args, kwargs)
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    try:
        dispatcher.sharding_propagator.propagate(info)
    except NotImplementedError:
        # Inference mode shows composite ops, which DTensor takes apart where it has no rule.
        parts = op.decompose(*args, **kwargs)
        if parts is NotImplemented:
            raise
        return parts
    assert info.output_sharding is not None
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return dispatcher.wrap(results, info.output_sharding.output_spec)


def _refuse(bound: dict[str, Any]) -> None:
    for name in ("attn_mask", "attn_bias"):
        if bound.get(name) is not None:
            raise ValueError(
                f"{name} cannot be served over a sharded sequence, got one of shape "
                f"{tuple(bound[name].shape)}; use is_causal, or dtensor_ring.ring_attention with "
                "a mask (causal, sliding, local) and cu_seqlens"
            )
    if bound["dropout_p"]:
        raise ValueError(
            f"dropout cannot be served over a sharded sequence, got dropout_p="
            f"{bound['dropout_p']}; set it to 0"
        )
    heads = [bound[name].shape[-3:-2] for name in ("query", "key")]
    if bound.get("enable_gqa") is False and heads[0] != heads[1]:  # only the composite op says it
        raise ValueError(
            f"query and key must have as many heads without enable_gqa=True, got shapes "
            f"{tuple(bound['query'].shape)} and {tuple(bound['key'].shape)}"
        )


def _options(bound: dict[str, Any]) -> Options:
    """Those of a call of an aten attention."""
    mask = Mask.causal() if bound["is_causal"] else Mask.full()
    scale = bound["scale"]
    if scale is None:
        scale = default_scale(bound["query"].shape[3])
    return Options(scale=scale).under(mask)


def _like_returns(op: OpOverload, out: DTensor, lse: DTensor) -> Any:
    """What the op returns: beside out and lse, the state of a dropout that there is not."""
    returns = op._schema.returns
    if len(returns) == 1:
        return out
    length = out.shape[SEQUENCE]
    rest = [length if str(value.type) != "Tensor" else None for value in returns[2:]]
    return (out, lse, *rest)
