"""What the autograd nodes of the ops share: gradients, batching, refusals and autocast.

Note [Levels]: `torch.func.grad` and other transforms wrap their inputs, each at its own level. The
dispatcher calls an op's "Autograd" kernel at one level, and calls below autograd continue at the
next lower level. So a kernel records a node for that one level only, a `_SingleLevelFunction`. The
user-facing `torch.autograd.Function` would start again at the first level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad, profiler
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

from dtensor_ring.ops.options import Leaf

ONCE = "ring attention is differentiable once, not twice"

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
            *leaves, keyset, lengths = inputs
            arguments = _nested(leaves, lengths)
            with torch._C._AutoDispatchBelowAutograd(), under_node():
                output = op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)
            setup_context(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return *pytree.tree_leaves(backward(ctx, *grads)), None, None

    def run(keyset: Any, *arguments: Any) -> Any:
        leaves, lengths = _flat(arguments)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
            return recorded(Node, *leaves, keyset, lengths)
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


def _flat(arguments: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
    """Return the arguments, with those of lists of tensors one by one, and the length of each list.

    Lists of numbers stay as they are: they have no gradients, and may be long.
    """
    leaves: list[Any] = []
    lengths: list[int | None] = []
    for x in arguments:
        is_list = isinstance(x, list) and bool(x) and (x[0] is None or isinstance(x[0], Tensor))
        leaves.extend(x) if is_list else leaves.append(x)
        lengths.append(len(x) if is_list else None)
    return leaves, lengths


def _nested(leaves: Sequence[Any], lengths: Sequence[int | None]) -> list[Any]:
    """Return the arguments that `_flat` gave these of."""
    rest, arguments = iter(leaves), []
    for length in lengths:
        arguments.append(next(rest) if length is None else [*islice(rest, length)])
    return arguments


def _op(name: str) -> Any:
    """Return the op of a qualified name."""
    return getattr(torch.ops.dtensor_ring, name.removeprefix("dtensor_ring::")).default


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the autocast dtype of a device type, `None` if autocast is off."""
    is_on = _has_autocast(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


# That of torch 2.11 cannot be traced. `torch.compiler.assume_constant_result` would load dynamo.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traced(x: Tensor) -> bool:
    """Return whether a compiler traces the call of which `x` is a tensor.

    Handlers of DTensors run in Python meanwhile. Before torch 2.15, only a tensor without content
    tells them.
    """
    return torch.compiler.is_compiling() or is_fake(x)


def cast(x: Tensor, device_type: str, dtype: torch.dtype) -> Tensor:
    """Cast a tensor if `scaled_dot_product_attention` would cast it under autocast."""
    is_eligible = x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if is_eligible and x.device.type == device_type else x


T = TypeVar("T")

_KEYS, _KeySet = torch._C.DispatchKey, torch._C.DispatchKeySet
_PLAIN = tuple(_KeySet(key).raw_repr() for key in (_KEYS.CPU, _KEYS.CUDA))

# The keys of a call outside of any mode, above autograd.
_EAGER = tuple(
    (_KeySet(device) | _KeySet(autograd) | _KeySet(_KEYS.ADInplaceOrView)).raw_repr()
    for device, autograd in ((_KEYS.CPU, _KEYS.AutogradCPU), (_KEYS.CUDA, _KEYS.AutogradCUDA))
)
_SELECT = _KeySet(_KEYS.BackendSelect)
_keys_of = torch._C._dispatch_keys
_included = torch._C._dispatch_tls_local_include_set
_excluded = torch._C._dispatch_tls_local_exclude_set

# By the keys that this thread includes and excludes, and those of tensors: whether they are plain.
# There are a few. Sets of keys are objects, and their union costs as much as this look-up.
_ARE_PLAIN: dict[tuple[int, ...], bool] = {}

# Stands for the keys of a call that is plain, see `is_plain`.
PLAIN = _KeySet(_KEYS.CPU)


def is_plain(*tensors: Tensor) -> bool:
    """Return whether the dispatcher would run the kernels of an op on these tensors as they are.

    They have content on a CPU or GPU, and no mode, transform, autocast or profiler sees the call.
    Then calling the op would only convert each argument twice.
    """
    if profiler._is_profiler_enabled or torch._C._is_torch_function_mode_enabled():
        return False
    seen = (
        _included().raw_repr(),
        _excluded().raw_repr(),
        *map(_KeySet.raw_repr, map(_keys_of, tensors)),
    )
    found = _ARE_PLAIN.get(seen)
    if found is None:
        keys = _included()
        for x in tensors:
            keys = keys | _keys_of(x)
        found = _ARE_PLAIN[seen] = (keys - _excluded() - _SELECT).raw_repr() in _EAGER
    return found


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


def register_autocast(name: str, op: Any, num_cast: int = 3) -> None:
    """Cast query, key and value to the autocast dtype, as scaled_dot_product_attention does.

    Nothing is cast below that.

    Args:
        name: of the op, with its namespace.
        op: its overload.
        num_cast: number of its first arguments that are cast; 0 for an op of backward.
    """
    for device_type in ("cpu", "cuda"):
        key = f"Autocast{device_type.upper()}"
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        run = partial(_below_autocast, device_type, keys, op, num_cast)
        torch.library.impl(name, key)(run)


def _below_autocast(device_type: str, keys: Any, op: Any, num_cast: int, *inputs: Any) -> Any:
    dtype = torch.get_autocast_dtype(device_type)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        cast_inputs = (cast(x, device_type, dtype) for x in inputs[:num_cast])
        return op(*cast_inputs, *inputs[num_cast:])
