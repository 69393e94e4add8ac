"""How an op is registered, and what the autograd nodes of ops share: levels, refusals, autocast."""

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
from torch.utils.flop_counter import register_flop_formula

from dtensor_ring.ops.options import Leaf

ONCE = "ring attention is differentiable once, not twice"
UNTRACED = (
    "compiled autograd cannot trace the backward of what ran eagerly over an axis: compile the "
    "forward, too, by torch.compile, or run this backward without compiled autograd "
    "(torch._dynamo.config.compiled_autograd = False)"
)

T = TypeVar("T")

LIBRARY = torch.library.Library("dtensor_ring", "FRAGMENT")

# With `mode="reduce-overhead"`, Inductor makes CUDA graphs of parts of a graph. An op that reads
# boundaries on the CPU must run between them: a replay would have those of the capture. Since torch
# 2.15 Inductor leaves ops of two devices out; before that, none of ours may be in a part.
_TAGS = (torch.Tag.cudagraph_unsafe,) if torch.__version__ < "2.15" else ()


def register_op(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    gradient: tuple[Callable[..., Any], Callable[..., None]] | None = None,
    autograd: Callable[..., Any] | None = None,
    of_integers: bool = False,
    num_cast: int | None = None,
    flops: Callable[..., int] | None = None,
) -> Any:
    """Define an op with all that PyTorch asks of one, and return its overload.

    `torch.vmap` runs it sample by sample, in the same order on all ranks.

    Args:
        name: its name in the namespace `dtensor_ring`.
        schema: its arguments and results, such as "(Tensor x) -> Tensor".
        run: computes its results from plain tensors.
        fake: returns the results without content, with the strides of those of `run`.
        gradient: what takes a context and gradients, and returns the gradients of all inputs; and
            what takes a context, inputs and output in forward. See Note [Levels].
        autograd: in place of `gradient`, all of the kernel: it takes a keyset and the inputs.
        of_integers: whether its results have no gradient, though its inputs may require one.
        num_cast: the number of its first arguments that autocast casts, as
            `scaled_dot_product_attention` does, nothing below it; `None` if it takes no notice.
        flops: takes its inputs, and `out_val`, and counts its floating-point operations.
    """
    full_name = f"dtensor_ring::{name}"
    torch.library.define(full_name, schema, tags=_TAGS)
    torch.library.impl(full_name, "CompositeExplicitAutograd")(run)
    torch.library.register_fake(full_name, fake)
    op: Any = getattr(torch.ops.dtensor_ring, name).default
    if gradient is not None:
        backward, setup_context = gradient
        autograd = _gradient_kernel(op, backward, setup_context)
    elif of_integers:
        autograd = partial(below_autograd, op, run)
    if autograd is not None:
        LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    # PyTorch would do this on its own for an op without lists of tensors, but warns.
    torch.library.register_vmap(full_name, partial(_run_samples, op), lib=LIBRARY)
    if num_cast is not None:
        _register_autocast(full_name, op, num_cast)
    if flops is not None:
        register_flop_formula(op.overloadpacket, get_raw=True)(flops)
    return op


# Note [Levels]: `torch.func.grad` and other transforms wrap their inputs, each at its own level.
# The dispatcher calls an op's "Autograd" kernel at one level, and calls below autograd continue at
# the next lower level. So a kernel records a node for that one level only, a
# `_SingleLevelFunction`. The user-facing `torch.autograd.Function` would start again at the first
# level.
class Node(_SingleLevelFunction):
    """An autograd node of an op, for one level."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> None:
        # It would trace messages as they are sent: what is in a graph are the ops.
        raise NotImplementedError(UNTRACED)


def _gradient_kernel(
    op: Any, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> Callable[..., Any]:
    """Return the autograd kernel of an op; `torch.library.register_autograd` has no levels."""

    class OpNode(Node):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            # Autograd looks for tensors among the arguments only, so lists come one by one.
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
            return recorded(OpNode, *leaves, keyset, lengths)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    OpNode.__name__ = OpNode.__qualname__ = op._opname
    return run


def _refuse_twice(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(ONCE)


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """Save nothing."""


ONCE_ONLY = _refuse_twice, _keep_nothing
"""The `gradient` of an op that computes gradients: it has none, and says so."""


def _run_samples(op: Any, info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """Run an op sample by sample, for `torch.vmap`."""
    leaves, spec = pytree.tree_flatten(arguments)
    dims = pytree.tree_leaves(in_dims)
    outputs = []
    # One call after another: ranks would not agree on calls that are made at once.
    for number in range(info.batch_size):
        sample = [
            x if dim is None else x.select(dim, number) for x, dim in zip(leaves, dims, strict=True)
        ]
        outputs.append(op(*pytree.tree_unflatten(sample, spec)))
    stacked = pytree.tree_map(lambda *parts: torch.stack(parts), *outputs)
    return stacked, pytree.tree_map(lambda _: 0, stacked)


def _register_autocast(name: str, op: Any, num_cast: int) -> None:
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


def _flat(arguments: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
    """Return the arguments, lists of tensors among them one by one, and the length of each list."""
    # Lists of numbers stay as they are: they have no gradients, and may be long.
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


def recorded(node: Any, *inputs: Any) -> Any:
    """Return `node.apply(*inputs)`, for the kernel of an op at any level.

    Args:
        node: a `Node`.
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


def is_any_mode_on() -> bool:
    """Return whether a mode, a transform, autocast or a profiler sees calls now.

    After `is_plain`, it tells whether one has begun since, in a tenth of the time: it makes no
    sets of keys.
    """
    return (
        profiler._is_profiler_enabled
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_any_autocast_enabled()
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
