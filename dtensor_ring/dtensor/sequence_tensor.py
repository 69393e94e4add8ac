"""The class of a sharded sequence: it computes operations of a user on shards, or refuses them.

torch.compile does not trace what this class does. It puts the function of PyTorch into the graph;
when that is computed, on tensors without content and then for the backend, it comes here again.
Gradients that enter a graph are DTensors, as torch 2.11 has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from traceback import walk_tb
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from dtensor_ring.dtensor import checkpoint
from dtensor_ring.dtensor.aligned import aligned
from dtensor_ring.dtensor.annotation import tokens_of
from dtensor_ring.dtensor.gradients import GRADIENTS, for_backward, of_one_loss
from dtensor_ring.dtensor.local_shapes import SHAPED, of_own_shard
from dtensor_ring.dtensor.sequence_order import (
    first_of,
    length_of,
    placed_tokens,
    refusal,
    sequence_dim,
    whole,
    wrapped,
)
from dtensor_ring.dtensor.token_index import INDEXING
from dtensor_ring.dtensor.token_mesh import PARTS
from dtensor_ring.dtensor.whole_results import RESULTS
from dtensor_ring.ops.nodes import is_traced

TWICE = "a sharded sequence is differentiable once, not twice; leave create_graph out"


def known(x: Any) -> Any:
    """Give a DTensor on a token mesh the class that goes with it, in place."""
    if type(x) is DTensor and tokens_of(x._spec.mesh) is not None:
        # The class adds no field, and a new object would have no gradient.
        x.__class__ = SequenceTensor
    return x


# Note [Right or refused]: the mesh of a sharded sequence makes DTensor refuse what would be
# computed in rank order, wherever the tensor goes (see Note [Token meshes]). This class does more.
# What is cheap and meant is right: a token, a range or a list of tokens, a sum or a mean over the
# sequence, the loss of all tokens, the tensor as a whole. Such a result is a plain tensor, the same
# on every rank. What acts on each token alone gives another sharded sequence. Everything else
# raises.
class SequenceTensor(DTensor):
    """A DTensor on a token mesh: a sequence that is sharded over an axis, and knows its order."""

    # No `__slots__`: copies by PyTorch, as those of `async_save`, read those of DTensor from here.

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the call in the graph comes here again
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _result(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler: Any = DTensor._op_dispatcher._custom_op_handlers.get(op)
        if getattr(handler, "is_ours", False):
            return tree_map_only(DTensor, known, handler(op, args, kwargs))
        if torch.Tag.inplace_view in op.tags:  # the object itself would have to change its shape
            raise refusal(first_of(args), _named(op))
        out = of_own_shard(op, args, kwargs) if op in SHAPED else NotImplemented
        if out is NotImplemented:
            # DTensor's own dispatch is faster than what it has for subclasses.
            out = op(*tree_map_only(cls, _plain, args), **tree_map_only(cls, _plain, kwargs))
        if op._schema.is_mutable and isinstance(args[0], cls):
            return args[0]
        out = tree_map_only(DTensor, known, out)
        return (
            return_and_correct_aliasing(op, args, kwargs, out) if op._schema._is_view_op() else out
        )

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> DTensor:
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        made.__class__ = SequenceTensor
        return made

    def __coerce_tangent_metadata__(self) -> DTensor:
        return _plain(self)

    def __coerce_same_metadata_as_tangent__(
        self, flatten_spec: Any, expected_type: Any = None
    ) -> Any:
        if expected_type is None:
            return super().__coerce_same_metadata_as_tangent__(flatten_spec)
        return _plain(self) if expected_type is DTensor else None

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Return this rank's tokens, in the order of its runs."""
        if torch.compiler.is_compiling() or grad_placements is not None:
            return super().to_local(grad_placements=grad_placements)
        return _ToLocal.apply(self) if torch.is_grad_enabled() else self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole sequence in its order, see `unshard_sequence`.

        Raises:
            ValueError: if `grad_placements` are given: backward sums the gradients of all ranks.
        """
        if grad_placements is not None:
            raise ValueError(
                "grad_placements are not for a sharded sequence: backward sums the gradients of "
                "the ranks, as that of unshard_sequence does; leave them out"
            )
        return whole(self)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Backpropagate a gradient of the whole sequence, or a sharded one of the same order."""
        super().backward(for_backward(gradient, self), retain_graph, create_graph, inputs)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Any = None, **how: Any
    ) -> DTensor:
        """Return the whole sequence as a DTensor on the mesh of the axis; refuse another order."""
        wanted = tuple(placements) if placements is not None else (Replicate(),)
        if wanted == tuple(self.placements):
            return self
        tokens = tokens_of(self.device_mesh)
        if wanted != (Replicate(),) or tokens is None:
            raise refusal(self, f"redistribute to {wanted}")
        return DTensor.from_local(self.full_tensor(), tokens.mesh, wanted, run_check=False)

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        return checkpoint.write_items(self, fqn)

    def __create_chunk_list__(self) -> Any:
        return checkpoint.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return checkpoint.piece(self, index)

    def __repr__(self, **how: Any) -> str:
        what = f"{tuple(self.shape)}, {self.placements} on {self.device_mesh}"
        return f"SequenceTensor(local_tensor={self._local_tensor}, {what})"


# As DTensor: `torch.load` reads it as data.
torch.serialization.add_safe_globals([SequenceTensor, *PARTS])


class _ToLocal(torch.autograd.Function):
    """`DTensor.to_local`, whose gradient is a sharded sequence again, as a graph expects."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        ctx.spec = x._spec
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # A gradient has no history, so `from_local` and its node are not needed. With a history,
        # a second derivative would lack a part, and nothing would say so.
        if torch.is_grad_enabled() and grads[0].requires_grad and not is_traced(grads[0]):
            raise NotImplementedError(TWICE)
        return known(DTensor(grads[0], ctx.spec, requires_grad=False))


def _attend(func: Any, query: Any, key: Any, value: Any, *args: Any, **how: Any) -> Any:
    """Compute the attention of sequences in one order: its op checks all that is checked here."""
    is_known = type(query) is type(key) is type(value) is SequenceTensor
    if not is_known or not (query._spec.mesh is key._spec.mesh is value._spec.mesh):
        return NotImplemented
    if 0 in (*query.shape[:-1], value.shape[-1]):
        return _of_nothing(func, (query, key, value, *args), how)
    # With a mask it takes the general way, which lines up all arguments.
    if (args and args[0] is not None) or how.get("attn_mask") is not None:
        return NotImplemented
    return func(query, key, value, *args, **how)


def _of_nothing(func: Any, given: Sequence[Any], how: dict[str, Any]) -> Any:
    """Return an empty result of attention: PyTorch makes a plain one, which DTensor refuses."""
    query, dim = given[0], given[0].ndim - 2
    if any(isinstance(x, SequenceTensor) and sequence_dim(x) != dim for x in given):
        return NotImplemented
    local = [x.to_local() if isinstance(x, SequenceTensor) else x for x in given]
    return wrapped(func(*local, **how), query, dim)


_RULES = INDEXING | RESULTS | GRADIENTS | {F.scaled_dot_product_attention: _attend}
_GRADIENT = vars(torch._C.TensorBase)["grad"]
PACKAGE = __name__.partition(".")[0] + "."


def _plain(x: Any) -> Any:
    """Return a DTensor of the same shard; below autograd, where nothing hangs on the object."""
    return DTensor(x._local_tensor, x._spec, requires_grad=x.requires_grad)


def _tell_compiler() -> bool:
    return _told()


# While a function is traced, it is called once, before what it tells is needed.
_tell_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _told() -> bool:
    """Tell torch.compile how to trace what this file does."""
    import torch._dynamo
    from torch._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    torch._dynamo.allow_in_graph(known)  # a change of class cannot be traced
    # What is called outside of a graph, after a break, must not be traced as if it were in one.
    eager = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(SequenceTensor.__torch_function__.__func__.__code__, eager)
    return True


def _result(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function on sharded sequences, or an attribute of one."""
    with torch._C.DisableTorchFunctionSubclass():
        if getattr(func, "__name__", "") == "__get__":  # an attribute
            found = known(func(args[0]))
            return of_one_loss(found, args[0]) if func.__self__ is _GRADIENT else found
        return _computed(func, args, kwargs)


def _computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function on sharded sequences, or refuse it."""
    rule: Callable[..., Any] | None = _RULES.get(func)
    if rule is not None:
        out = rule(func, *args, **kwargs)
        if out is not NotImplemented:
            return out
    args, kwargs = aligned(func, args, kwargs)
    length = length_of(args)
    try:
        out = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError) as error:
        if _is_ours(error):
            raise
        x = first_of(args)
        why = str(refusal(x, _named(func)))
        is_builtin = type(error).__module__ == "builtins"
        if is_builtin and isinstance(x._local_tensor, FakeTensor):  # compilers show no notes
            raise type(error)(f"{error}\n{why}") from error
        error.add_note(why)
        raise
    return tree_map_only(DTensor, lambda x: _checked(x, length, func), out)


def _is_ours(error: BaseException) -> bool:
    """Return whether another module of ours raised an error, which says what to write itself."""
    # The innermost frame raised it.
    *_, (frame, _) = walk_tb(error.__traceback__)
    name = frame.f_globals.get("__name__", "")
    return name.startswith(PACKAGE) and name != __name__


def _checked(x: DTensor, length: int | None, func: Any) -> Any:
    """Return a result as a sharded sequence, if it is still one with the same tokens."""
    if tokens_of(x._spec.mesh) is None:
        return x
    where: Any = x.placements[0]
    if where.is_replicate() and not x.requires_grad:
        return x._local_tensor  # new tensors, such as those of `new_zeros`
    is_other = where.is_shard() and length not in (None, x.shape[where.dim])
    if is_other or where.is_replicate() or where.is_partial():
        raise refusal(x, _named(func))
    return known(x)


def _named(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def from_local_tokens(local: Tensor, mesh: DeviceMesh, dim: int, seq_len: int) -> DTensor:
    """Make the DTensor of `seq_len` tokens whose local shard is `local`, on a token mesh.

    Raises:
        NotImplementedError: within a transform of `torch.func`.
    """
    _refuse_transforms(local)
    _tell_compiler()
    return known(placed_tokens(local, mesh, dim, seq_len))


def from_equal_shards(local: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Make the DTensor of shards of equal length, see `from_local_tokens`.

    Raises:
        NotImplementedError: within a transform of `torch.func`.
    """
    _refuse_transforms(local)
    _tell_compiler()
    # No check: comparing shapes over the ranks would cost a collective for each tensor.
    return known(DTensor.from_local(local, mesh, [Shard(dim)], run_check=False))


def _refuse_transforms(local: Tensor) -> None:
    """Refuse to make a DTensor within a transform of `torch.func`, where PyTorch cannot.

    Raises:
        NotImplementedError: says what to call instead.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(local):
        raise NotImplementedError(
            "grad, vmap and other transforms of torch.func cannot make a DTensor of their tensor, "
            "as shard_sequence, ContextParallel and plans do; transform what calls "
            "ring_attention(query, key, value, mesh=mesh) with local tensors"
        )
