"""What the autograd nodes of the ops share: the way below autograd, refusals, and autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dtensor_ring.ops.arguments import Leaf
from dtensor_ring.ops.autocast import cast
from dtensor_ring.ops.transforms import under_node

T = TypeVar("T")

_PLAIN = tuple(
    torch._C.DispatchKeySet(key).raw_repr()
    for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
)


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


def refuse_tangents(inputs: tuple[Any, ...]) -> None:
    """Refuse forward-mode tangents, which autograd would drop silently or refuse less clearly."""
    for x in inputs:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("attention over an axis has no forward-mode derivative")


def place_of_sinks(leaves: tuple[Leaf, ...]) -> int:
    """Return the index of the sinks among the flat options of an op."""
    return [leaf.name for leaf in leaves].index("sinks")


def register_autocast(name: str, op: Any) -> None:
    """Cast query, key and value to the autocast dtype, as scaled_dot_product_attention does.

    Nothing is cast below that, nor in backward.

    Args:
        name: of the op, with its namespace.
        op: its overload; query, key and value are its first arguments.
    """
    for device_type in ("cpu", "cuda"):

        def run(
            query: Tensor, key: Tensor, value: Tensor, *options: Any, on: str = device_type
        ) -> Any:
            dtype = torch.get_autocast_dtype(on)
            with _without_autocast(on):
                return op(*(cast(x, on, dtype) for x in (query, key, value)), *options)

        torch.library.impl(name, f"Autocast{device_type.upper()}")(run)


def register_no_autocast(name: str, op: Any) -> None:
    """Run an op below autocast: its inputs have the dtypes that it wants."""
    for device_type in ("cpu", "cuda"):

        def run(*inputs: Any, on: str = device_type) -> Any:
            with _without_autocast(on):
                return op(*inputs)

        torch.library.impl(name, f"Autocast{device_type.upper()}")(run)


def _without_autocast(device_type: str) -> Any:
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))
