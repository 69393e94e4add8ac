"""Runs `F.scaled_dot_product_attention` on DTensors of an annotated mesh as ring attention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from dtensor_ring.compute.kernels import Scores
from dtensor_ring.dtensor import dispatch
from dtensor_ring.dtensor.call_check import scores_of
from dtensor_ring.dtensor.placement import SEQUENCE, on_annotated_axis
from dtensor_ring.ops.checks import called_from, check_head_dims
from dtensor_ring.ops.nodes import ONCE, is_traced
from dtensor_ring.ops.options import ON_DTENSORS, Batch, Call, default_scale, flatten
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.planning.tile import CAUSAL, FULL

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
FUSED_OP = aten._scaled_dot_product_flash_attention_for_cpu.default  # any would do
UNFUSED_OP = aten._scaled_dot_product_attention_math.default
FUSED_DROPOUT = (
    "dropout_p over a sharded sequence drops weights by their positions in it, which {op} cannot; "
    "call it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or call ring_attention"
)
OTHER_DIM = (
    "attention is not run as a ring here, and DTensor has no rule for it: a ring needs query, key "
    "and value (..., heads, sequence, head dim) whose sequence is sharded over an axis that has a "
    "layout, Shard({dim}) of {ndim} dims, and these are in {placed}; see shard_sequence, or call "
    "transpose(1, 2) on (batch, sequence, heads, head dim)"
)
# How ops that attention is made of fail on DTensors: PyTorch's own causal mask is plain, and older
# versions cannot flatten sharded dims.
OF_PARTS = "got mixed torch.Tensor and DTensor", "Sharding propagation failed"

INPUTS = ("query", "key", "value")

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]

Attention = tuple[Callable[..., tuple[DTensor, DTensor]], Any]
"""What computes an attention on query, key and value, and the call that it takes after these."""

others: list[Callable[[dict[str, Any]], Attention | None]] = []
"""What features serve by other means than a ring, given an attention's arguments by name."""


def install_sdpa() -> None:
    """Let DTensor's dispatcher ask us first about attention; other calls continue as before."""
    add_handlers(FORWARD_OPS, _forward_handler)
    add_handlers(BACKWARD_OPS, _backward_handler)
    _serve_unfused()


def add_handlers(ops: Iterable[OpOverload], make: Callable[[Handler | None], Handler]) -> None:
    """Put handlers into DTensor's table; `make` gets the previous handler, to chain to it."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for op in ops:
        # Install once: a second handler would chain to the first.
        if getattr(handlers.get(op), "is_ours", False):
            continue
        handlers[op] = handler = make(handlers.get(op))
        handler.is_ours = True  # pyrefly: ignore[missing-attribute]


def _forward_handler(previous: Handler | None) -> Handler:
    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = dispatch.arguments_of(op, args, kwargs)
        query, key, value = inputs = [bound[name] for name in INPUTS]
        if not _is_sharded(inputs):
            return as_before(previous, op, args, kwargs)
        _refuse(bound)
        if bound["dropout_p"] and _rest_of_returns(op) is not None:
            raise ValueError(FUSED_DROPOUT.format(op=op.overloadpacket.__name__))
        if query.ndim != 4:  # only the composite op takes these
            return _fused(bound)
        attend, call = _attention_of(bound)
        out, lse = called_from(sys._getframe(1), attend, query, key, value, call)
        return _like_returns(op, out, lse)

    return handle


def _backward_handler(previous: Handler | None) -> Handler:
    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = dispatch.arguments_of(op, args, kwargs)
        query, key, value = bound["query"], bound["key"], bound["value"]
        if not on_annotated_axis(query, SEQUENCE):
            return as_before(previous, op, args, kwargs)
        grad_out = bound["grad_out_"] if "grad_out_" in bound else bound["grad_out"]
        # `logsumexp` is the lse of our forward: natural log, over all keys.
        out, lse, call = bound["out"], bound["logsumexp"], _call(bound)
        _refuse_graph(grad_out, query, key, value)
        *grads, _ = dispatch.ring_backward_dtensor(
            grad_out, None, query, key, value, out, lse, call
        )
        return (*grads, None)[: len(op._schema.returns)]

    return handle


def _refuse_graph(*tensors: DTensor) -> None:
    """Refuse a backward that makes a graph of itself, for a second one."""
    # PyTorch would raise in that one only, and name an op of which the user knows nothing.
    # In backward, gradients are on with `create_graph`, and in `torch.func`, whose tensors need
    # none here.
    needs = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if needs and not is_traced(tensors[0]):
        raise NotImplementedError(f"{ONCE}; leave create_graph out")


def _serve_unfused() -> None:
    """Run attention that PyTorch would compute op by op as a ring, too."""
    # PyTorch does this for dropout, different head dims and other reasons, or if a context asks for
    # it. It adds a causal mask that is not a DTensor, before DTensor's dispatcher sees an
    # attention.
    for device in ("CPU", "CUDA", "Meta"):
        key = f"Autograd{device}"
        # PyTorch has no kernel there, so an existing one is ours.
        if not torch._C._dispatch_has_kernel_for_dispatch_key(UNFUSED_OP.name(), key):
            torch.library.impl(UNFUSED_OP.name(), key, _unfused)


def _unfused(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    # Plain tensors come here, too, so check cheaply. The first three arguments have no default.
    if not _is_sharded(args[:3]):
        try:
            return UNFUSED_OP.decompose(*args, **kwargs)
        except RuntimeError as error:
            if any(text in str(error) for text in OF_PARTS):
                raise _other_dim(args) from error
            raise
    bound = dispatch.arguments_of(UNFUSED_OP, args, kwargs)
    _refuse(bound)
    return _fused(bound), None  # nobody reads the weights


def _fused(bound: dict[str, Any]) -> Any:
    """Call an op that DTensor dispatches to us, for any number of dims."""
    inputs, shape = [bound[name] for name in INPUTS], bound["query"].shape
    if len(shape) != 4:
        # Dims before the heads become one batch; (L, H) becomes one head.
        inputs = [x.reshape((-1, *(1, *x.shape)[-3:])) for x in inputs]
    query, key, value = inputs
    if bound["dropout_p"]:  # which our own op alone can serve
        out, *_ = ring_op(query, key, value, *flatten(_call(bound)))
    else:
        out, *_ = FUSED_OP(query, key, value, 0.0, bound["is_causal"], scale=bound["scale"])
    return out if len(shape) == 4 else out.reshape((*shape[:-1], out.shape[-1]))


def _is_sharded(inputs: Iterable[Any]) -> bool:
    """Return whether a sequence is sharded over an axis that has a layout."""
    # One of the three suffices: if only keys are sharded, our error says it.
    return any(on_annotated_axis(x, x.ndim - 2) for x in inputs)


def as_before(
    previous: Handler | None, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Dispatch as DTensor does without this module."""
    if previous is not None:
        return previous(op, args, kwargs)
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    try:
        dispatcher.sharding_propagator.propagate(info)
    except NotImplementedError as error:
        # In inference mode composite ops arrive, which DTensor decomposes if it has no rule.
        parts = op.decompose(*args, **kwargs)
        if parts is NotImplemented:
            raise _other_dim(args) from error
        return parts
    assert info.output_sharding is not None
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return dispatcher.wrap(results, info.output_sharding.output_spec)


def _other_dim(args: Iterable[Any]) -> NotImplementedError:
    tensors = [x for x in args if isinstance(x, DTensor)]
    ndim, placed = tensors[0].ndim, [x.placements for x in tensors]
    return NotImplementedError(OTHER_DIM.format(dim=ndim - 2, ndim=ndim, placed=placed))


def _refuse(bound: dict[str, Any]) -> None:
    query, key, value = bound["query"], bound["key"], bound["value"]
    if query.shape[-1] > key.shape[-1]:  # within, to forget the layer's name
        called_from(sys._getframe(1), check_head_dims, query, key, value)
    for name in ("attn_mask", "attn_bias"):
        if bound.get(name) is not None:
            raise ValueError(
                f"{name} cannot be served over a sharded sequence, got one of shape "
                f"{tuple(bound[name].shape)}; use is_causal, or dtensor_ring.ring_attention with "
                "a mask (causal, sliding, local) and cu_seqlens"
            )
    if bound.get("enable_gqa") is not False:  # only the composite op has this argument
        return
    if query.shape[-3:-2] != key.shape[-3:-2]:
        raise ValueError(
            f"query and key must have as many heads without enable_gqa=True, got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )


def _attention_of(bound: dict[str, Any]) -> Attention:
    """Return the function of an attention: that of a feature which takes it over, or the ring."""
    for other in others:
        if attention := other(bound):
            return attention
    return dispatch.ring_forward_dtensor, _call(bound)


def _call(bound: dict[str, Any]) -> Call:
    """Return the ring call for the arguments of an aten attention."""
    return Call(Batch(), scores_of_sdpa(bound), ON_DTENSORS)


def scores_of_sdpa(bound: dict[str, Any]) -> Scores:
    """Return how queries score keys, from the arguments of an aten attention."""
    mask = CAUSAL if bound["is_causal"] else FULL
    scale = bound["scale"]
    if scale is None:
        scale = default_scale(bound["query"].shape[-1])
    return scores_of(bound["query"], mask, scale, 0.0, None, None, bound["dropout_p"])


def _like_returns(op: OpOverload, out: DTensor, lse: DTensor) -> Any:
    """Return the results in the op's form: out, lse, and an unused dropout state."""
    rest = _rest_of_returns(op)
    if rest is None:
        return out
    return out, lse, *(out.shape[SEQUENCE] if is_length else None for is_length in rest)


@cache
def _rest_of_returns(op: OpOverload) -> tuple[bool, ...] | None:
    """Return, for each result after out and lse, whether it is a length; `None` for out alone."""
    returns = op._schema.returns
    if len(returns) == 1:
        return None
    return tuple(str(value.type) != "Tensor" for value in returns[2:])
