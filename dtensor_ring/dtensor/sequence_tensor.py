"""The class of a sharded sequence, which answers what a user does with it, or refuses.

Note [Right or refused]: the mesh of a sharded sequence makes DTensor refuse what would be computed
in rank order, wherever the tensor goes (see Note [Token meshes]). In eager calls this class does
more. What is cheap and meant is right: a token, a range or a list of tokens, a sum or a mean over
the sequence, the loss of all tokens, the tensor as a whole. Such a result is a plain tensor, the
same on every rank. What acts on each token alone
gives another sharded sequence. Everything else raises. Graphs have DTensors in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from dtensor_ring.dtensor import checkpoint
from dtensor_ring.dtensor.aligned import aligned
from dtensor_ring.dtensor.annotation import tokens_of
from dtensor_ring.dtensor.sequence_order import (
    first_of,
    length_of,
    order_of,
    own_tokens,
    placed_tokens,
    refusal,
    sequence_dim,
    whole,
    wrapped,
)
from dtensor_ring.dtensor.token_index import INDEXING
from dtensor_ring.dtensor.whole_results import RESULTS


class SequenceTensor(DTensor):
    """A DTensor on a token mesh: a sequence that is sharded over an axis, and knows its order."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling():
                return func(*args, **kwargs)
            if getattr(func, "__name__", "") == "__get__":  # an attribute
                return known(func(*args))
            return _computed(func, args, kwargs)

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
        # DTensor's own dispatch is faster than what it has for subclasses.
        out = op(*tree_map_only(cls, _plain, args), **tree_map_only(cls, _plain, kwargs))
        if op._schema.is_mutable and isinstance(args[0], cls):
            return args[0]
        if not op._schema._is_view_op():
            return tree_map_only(DTensor, known, out)
        # A view has the class of what it shows, in a graph, too.
        out = tree_map_only(DTensor, _as_sequence, out)
        return return_and_correct_aliasing(op, args, kwargs, out)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> DTensor:
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        made.__class__ = SequenceTensor
        return made

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

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """Backpropagate a gradient of the whole sequence, or a sharded one of the same order.

        Ranks average the gradients of weights behind a model's outputs, and each has its own tokens
        only: so their gradients count once for each rank.
        """
        if gradient is not None:
            dim = sequence_dim(self)
            if dim < 0:
                raise refusal(self, "backward")
            local, tokens = own_tokens(gradient, self, dim), order_of(self)
            gradient = wrapped(local * tokens.mesh.size() if tokens.averages else local, self, dim)
        super().backward(gradient, *args, **kwargs)

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


class _ToLocal(torch.autograd.Function):
    """`DTensor.to_local`, whose gradient is a sharded sequence again, as a graph expects."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        ctx.spec = x._spec
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # A gradient has no history, so `from_local` and its node are not needed.
        return known(DTensor(grads[0], ctx.spec, requires_grad=False))


_RULES = INDEXING | RESULTS


def known(x: Any) -> Any:
    """Give a DTensor on a token mesh the class that goes with it, in place; not in a graph."""
    # A compiler's tensors have other types.
    if (
        torch.compiler.is_compiling()
        or type(x) is not DTensor
        or type(x._local_tensor) is not Tensor
    ):
        return x
    return _as_sequence(x)


def _as_sequence(x: Any) -> Any:
    if tokens_of(x._spec.mesh) is not None:
        # The class adds no field, and a new object would have no gradient.
        x.__class__ = SequenceTensor
    return x


def _plain(x: Any) -> Any:
    """Return a DTensor of the same shard; below autograd, where nothing hangs on the object."""
    return DTensor(x._local_tensor, x._spec, requires_grad=x.requires_grad)


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
        error.add_note(str(refusal(first_of(args), _named(func))))
        raise
    return tree_map_only(DTensor, lambda x: _checked(x, length, func), out)


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
    refuse_transforms(local)
    return known(placed_tokens(local, mesh, dim, seq_len))


def refuse_transforms(local: Tensor) -> None:
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
