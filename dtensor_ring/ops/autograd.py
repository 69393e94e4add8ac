"""Autograd and autocast of the ops."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from dtensor_ring.agreement.session import session_of
from dtensor_ring.ops import decode, exchange
from dtensor_ring.ops.arguments import Leaf
from dtensor_ring.ops.autocast import cast
from dtensor_ring.ops.decode import DECODE, decode_op
from dtensor_ring.ops.decode_options import DECODE_LEAVES
from dtensor_ring.ops.exchange import EXCHANGE, exchange_op
from dtensor_ring.ops.exchange_options import Dealt, Seen, flatten_trade, unflatten_trade
from dtensor_ring.ops.options import LEAVES
from dtensor_ring.ops.schema import (
    BACKWARD,
    FORWARD,
    backward,
    forward,
    ring_backward_op,
    ring_op,
)
from dtensor_ring.ops.transforms import LIBRARY, recorded, register_samples, under_node

Result = tuple[Tensor, Tensor]
T = TypeVar("T")

_TENSORS = [i for i, leaf in enumerate(LEAVES) if leaf.schema_type == "Tensor?"]
_PLAIN = tuple(
    torch._C.DispatchKeySet(key).raw_repr()
    for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
)


def _place_of_sinks(leaves: tuple[Leaf, ...]) -> int:
    return [leaf.name for leaf in leaves].index("sinks")


_SINKS, _DECODE_SINKS = _place_of_sinks(LEAVES), _place_of_sinks(DECODE_LEAVES)


class _RingFunction(_SingleLevelFunction):
    """The autograd node of a call.

    We do not use `torch.library.register_autograd`: it compares every argument of the schema with
    every other one, and with this many arguments that dominates the host time of a call. For the
    same reason the options are one argument. Only the sinks among them have a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any, keyset: Any, options: Any
    ) -> Result:
        output = below_autograd(
            *(ring_op, forward, keyset, query, key, value, *options), of_node=True
        )
        # Tensors are saved, so that hooks (offloading, checkpointing) see them.
        ctx.save_for_backward(query, key, value, *output, *[options[i] for i in _TENSORS])
        ctx.options = list(options)
        for i in _TENSORS:
            ctx.options[i] = None
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_out, grad_lse = grads
        if grad_out is None and grad_lse is None:
            return (None,) * 6
        query, key, value, out, lse, *saved = ctx.saved_tensors
        options = list(ctx.options)
        for i, x in zip(_TENSORS, saved, strict=True):
            options[i] = x
        # Only lse was used: the formula still takes a gradient of out.
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        inputs = grad_out, grad_lse, query, key, value, out, lse, *options
        # Without `create_graph` nothing is recorded, and autograd need not look at the arguments.
        with nullcontext() if torch.is_grad_enabled() else torch._C._AutoDispatchBelowAutograd():
            *of_inputs, grad_sinks = ring_backward_op(*inputs)
        # Without sinks their gradient is an empty tensor.
        return *of_inputs, None if options[_SINKS] is None else grad_sinks, None, None


def below_autograd(
    op: Any, run: Callable[..., T], keyset: Any, *inputs: Any, of_node: bool = False
) -> T:
    """Run an op below autograd and return its results.

    Args:
        op: the op.
        run: the op's implementation on plain tensors.
        keyset: the dispatch keys of the call.
        inputs: the inputs of the op.
        of_node: whether the `forward` of an autograd node makes this call.
    """
    below = keyset & torch._C._after_autograd_keyset
    # View tracking is off, too. Outputs are permuted views of fresh memory, and autograd refuses
    # in-place changes of a view that a function returns.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        # For plain tensors outside of any mode, the dispatcher would only convert each argument
        # twice.
        if is_plain_call(keyset):
            return run(*inputs)
        with under_node() if of_node else nullcontext():
            return op.redispatch(below, *inputs)


def is_plain_call(keyset: Any) -> bool:
    """Return whether a call is on plain tensors outside of any mode."""
    return (keyset & torch._C._after_autograd_keyset).raw_repr() in _PLAIN


def _autograd(keyset: Any, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Result:
    # Inference needs no node, so it does not pay for saving tensors.
    inputs = query, key, value, options[_SINKS]
    if forward_ad._current_level >= 0:
        refuse_tangents(inputs)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return recorded(_RingFunction, *inputs, keyset, options)
    return below_autograd(ring_op, forward, keyset, query, key, value, *options)


def _without_gradient(
    keyset: Any, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> Result:
    """Run the decode op, which has no gradient."""
    inputs = query, key, value, options[_DECODE_SINKS]
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        raise NotImplementedError(NO_GRADIENT)
    if forward_ad._current_level >= 0:
        refuse_tangents(inputs)
    return below_autograd(decode_op, decode.forward, keyset, query, key, value, *options)


NO_GRADIENT = (
    "decode_attention has no gradient, and one of query, key, value and sinks needs one; call it "
    "within torch.no_grad(), or train with ring_attention"
)


class _ExchangeFunction(_SingleLevelFunction):
    """The autograd node of an exchange. It is linear: its backward is the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, options: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = below_autograd(
            *(exchange_op, exchange.forward, keyset, [*tensors], *options), of_node=True
        )
        trade = unflatten_trade(options)
        ctx.save_for_backward(*trade.dealt)
        # While a compiler traces, no call is made, so there is no call number.
        origin = session_of(trade.group).number if is_plain_call(keyset) else 0
        ctx.trade = trade._replace(
            dealt=Dealt(),
            seen=Seen(),  # the forward call has checked it
            key_seq_len=None,
            is_back=not trade.is_back,
            num_tokens=tensors[0].shape[2],
            origin=0 if trade.origin else origin,
        )
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        given = [i for i, grad in enumerate(grads) if grad is not None]
        results: list[Any] = [None] * len(grads)
        if given:
            trade = ctx.trade._replace(
                dealt=Dealt(*ctx.saved_tensors),
                num_heads=tuple(ctx.trade.num_heads[i] for i in given),
            )
            found = exchange_op([grads[i] for i in given], *flatten_trade(trade))
            for i, grad in zip(given, found, strict=True):
                results[i] = grad
        return None, None, *results


def _exchange(keyset: Any, tensors: list[Tensor], *options: Any) -> Any:
    if forward_ad._current_level >= 0:
        refuse_tangents(tuple(tensors))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return list(recorded(_ExchangeFunction, keyset, options, *tensors))
    return below_autograd(exchange_op, exchange.forward, keyset, tensors, *options)


def refuse_tangents(inputs: tuple[Any, ...]) -> None:
    """Refuse forward-mode tangents, which autograd would drop silently or refuse less clearly."""
    for x in inputs:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("attention over an axis has no forward-mode derivative")


class _BackwardFunction(_SingleLevelFunction):
    """The autograd node of a backward call, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
        return below_autograd(ring_backward_op, backward, keyset, *inputs, of_node=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError("ring attention is differentiable once, not twice")


def _backward(keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return recorded(_BackwardFunction, keyset, *inputs)
    return below_autograd(ring_backward_op, backward, keyset, *inputs)


LIBRARY.impl("ring_attention", _autograd, "Autograd", with_keyset=True)
LIBRARY.impl("ring_attention_backward", _backward, "Autograd", with_keyset=True)
LIBRARY.impl("decode_attention", _without_gradient, "Autograd", with_keyset=True)
LIBRARY.impl("exchange", _exchange, "Autograd", with_keyset=True)
for _name in (FORWARD, BACKWARD, DECODE, EXCHANGE):
    register_samples(_name)


def _autocast(device_type: str) -> None:
    """Register the autocast rules of the ops for a device type.

    Forward casts query, key and value as `scaled_dot_product_attention` does. Autocast is off below
    the op and in backward.
    """
    name = f"Autocast{device_type.upper()}"
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))

    def run(op: Any, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Result:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            inputs = (cast(x, device_type, dtype) for x in (query, key, value))
            return op(*inputs, *options)

    def run_backward(*inputs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return ring_backward_op(*inputs)

    torch.library.impl(FORWARD, name)(partial(run, ring_op))
    torch.library.impl(DECODE, name)(partial(run, decode_op))
    torch.library.impl(BACKWARD, name)(run_backward)


_autocast("cpu")
_autocast("cuda")
