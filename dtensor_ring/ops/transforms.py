"""Registers gradients and batching of ops, also within the transforms of `torch.func`.

Note [Levels]: `torch.func.grad` and other transforms wrap their inputs, each at its own level. The
dispatcher calls an op's "Autograd" kernel at one level, and calls below autograd continue at the
next lower level. So a kernel records a node for that one level only, a `_SingleLevelFunction`. The
user-facing `torch.autograd.Function` would start again at the first level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

LIBRARY = torch.library.Library("dtensor_ring", "FRAGMENT")


def recorded(node: Any, *inputs: Any) -> Any:
    """Return `node.apply(*inputs)`, for the kernel of an op at any level.

    Args:
        node: a `_SingleLevelFunction`.
        inputs: all arguments of its `forward`.
    """
    if not torch._C._are_functorch_transforms_active():
        return node.apply(*inputs)
    with enable_single_level_autograd_function():
        return node.apply(*inputs)


@contextmanager
def under_node() -> Iterator[None]:
    """Turn gradients, which are off in a node's `forward`, on for the levels below it."""
    if not torch._C._are_functorch_transforms_active():
        yield
        return
    with torch.enable_grad(), _set_fwd_grad_enabled(True):
        yield


def register_gradient(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Register the gradient of an op; unlike `torch.library.register_autograd`, at any level.

    Args:
        name: the op's name with its namespace.
        backward: takes a context and gradients, and returns the gradients of all inputs.
        setup_context: takes a context, inputs and output.
    """
    op = _op(name)

    class Node(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            *leaves, keyset, spec = inputs
            arguments = pytree.tree_unflatten(leaves, spec)
            with torch._C._AutoDispatchBelowAutograd(), under_node():
                output = op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)
            setup_context(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return *pytree.tree_leaves(backward(ctx, *grads)), None, None

    def run(keyset: Any, *arguments: Any) -> Any:
        leaves, spec = pytree.tree_flatten(arguments, is_leaf=_is_no_tensors)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
            return recorded(Node, *leaves, keyset, spec)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    Node.__name__ = Node.__qualname__ = op._opname
    LIBRARY.impl(op._opname, run, "Autograd", with_keyset=True)


def register_samples(name: str) -> None:
    """Let `torch.vmap` run an op sample by sample, in the same order on all ranks.

    PyTorch does this on its own for an op without lists of tensors, but warns.

    Args:
        name: the op's name with its namespace.
    """
    op = _op(name)

    def run(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        leaves, spec = pytree.tree_flatten(arguments)
        dims = pytree.tree_leaves(in_dims)
        outputs = []
        for number in range(info.batch_size):
            sample = [
                x if dim is None else x.select(dim, number)
                for x, dim in zip(leaves, dims, strict=True)
            ]
            outputs.append(op(*pytree.tree_unflatten(sample, spec)))
        stacked = pytree.tree_map(lambda *parts: torch.stack(parts), *outputs)
        return stacked, pytree.tree_map(lambda _: 0, stacked)

    torch.library.register_vmap(name, run, lib=LIBRARY)


def _is_no_tensors(argument: Any) -> bool:
    """Return whether an argument is a list without tensors, whose elements have no gradients."""
    return isinstance(argument, list) and not any(isinstance(x, Tensor) for x in argument)


def _op(name: str) -> Any:
    """Return the op of a qualified name."""
    return getattr(torch.ops.dtensor_ring, name.removeprefix("dtensor_ring::")).default
