"""What a sharded sequence knows: its order, the tokens of this rank, the whole of it.

Results as a whole are plain tensors, the same on every rank, see Note [Right or refused].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.compute.memory import strides
from dtensor_ring.dtensor.annotation import group_of, tokens_of
from dtensor_ring.dtensor.axis_config import Tokens
from dtensor_ring.dtensor.gather import sum_over_sequence, whole_sequence
from dtensor_ring.planning.layout import Layout


def refusal(x: Any, what: str) -> ValueError:
    """Return the error of an operation that reaches along a sharded sequence."""
    tokens = tokens_of(x.device_mesh)
    order = f"{tokens.layout.spec} order over {x.device_mesh.size()} ranks" if tokens else "shards"
    where = x.placements[0]
    dim = where.dim if where.is_shard() else "dim"
    return ValueError(
        f"{what} reaches along a sequence that is sharded in {order}, of {tuple(x.shape)}: make it "
        f"whole first, unshard_sequence(x, {dim}), or take the tokens of this rank, x.to_local(); "
        "of logits, the last ones are logits_to_keep="
    )


def sequence_dim(x: DTensor) -> int:
    """Return the dimension of the sequence; -1 if it was flattened with others."""
    where = x.placements[0]
    return where.dim if type(where) is Shard else -1


def first_of(args: Any) -> Any:
    """Return the first argument that is a sharded sequence, also of a list."""
    for x in args:
        if isinstance(x, DTensor) and tokens_of(x._spec.mesh) is not None:
            return x
        found = first_of(x) if isinstance(x, (list, tuple)) else None
        if found is not None:
            return found
    return None


def length_of(args: Any) -> int | None:
    """Return the number of tokens of the first sharded sequence among arguments."""
    x = first_of(args)
    return None if x is None or sequence_dim(x) < 0 else x.shape[sequence_dim(x)]


def order_of(x: DTensor) -> Tokens:
    """Return what a sharded sequence knows."""
    tokens = tokens_of(x.device_mesh)
    assert tokens is not None, "a sharded sequence is on a token mesh"
    return tokens


def own_rank(x: DTensor) -> int:
    """Return this rank on the axis of a sharded sequence.

    Its mesh may be of a group that was destroyed since, see `group_of`, and can tell no rank.
    """
    return group_of(x.device_mesh, 0).rank()


def whole(x: DTensor) -> Tensor:
    """Return the whole sequence in its order, see `unshard_sequence`."""
    dim = sequence_dim(x)
    if dim < 0:
        raise refusal(x, "full_tensor")
    group = group_of(x.device_mesh, 0)
    found = whole_sequence(x.to_local(), dim, group, x.shape[dim], order_of(x).layout)
    return with_gradient(found, x)


def with_gradient(result: Tensor, x: DTensor) -> Tensor:
    """Give a whole result the gradient that the sequence is to have.

    What made it sums the gradients of all ranks, which then average over the axis. Of a tensor that
    no model on local shards made, it is that of DTensor: of one loss, not of one for each rank.
    """
    if order_of(x).averages or not result.requires_grad:
        return result
    return _Scaled.apply(result, 1 / x.device_mesh.size())


class _Scaled(torch.autograd.Function):
    """The identity, with a scaled gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


def local_tokens(tensor: Tensor, mesh: DeviceMesh, dim: int, layout: Layout) -> Tensor:
    """Return this rank's tokens of a whole tensor, in contiguous memory; `mesh` is the axis's."""
    runs = layout.runs(group_of(mesh, 0).rank(), mesh.size(), tensor.shape[dim])
    # Of a run 1 3 5, with stride 2, take every second one of the five tokens from 1 on.
    parts = [
        # Runs are strided views, so `cat` makes the only copy.
        tensor.narrow(dim, run.start, (run.length - 1) * run.stride + 1)[
            (slice(None),) * (dim % tensor.ndim) + (slice(None, None, run.stride),)
        ]
        for run in runs
    ]
    return torch.cat(parts or [tensor.narrow(dim, 0, 0)], dim)


def same_order(x: DTensor, y: DTensor) -> bool:
    """Return whether two sequences have the same tokens on each rank."""
    one, other = tokens_of(x.device_mesh), tokens_of(y.device_mesh)
    if one is None or other is None:
        return False
    return one.mesh == other.mesh and one.layout == other.layout


def own_tokens(given: Any, x: DTensor, dim: int) -> Tensor:
    """Return this rank's tokens of another argument: a sharded sequence, or a whole tensor."""
    if isinstance(given, DTensor):
        if not same_order(given, x) or sequence_dim(given) != dim:
            raise refusal(x, "a function of this and of a DTensor that is placed otherwise")
        return given.to_local()
    size = x.shape[sequence_dim(x)]
    if given.ndim <= dim or given.shape[dim] != size:
        raise refusal(x, f"a function of this and of a plain tensor of {tuple(given.shape)}")
    if given.requires_grad and torch.is_grad_enabled() and not order_of(x).averages:
        # A rank's gradient covers its own tokens only; those of a plan's outputs are summed.
        raise refusal(x, "a function of this and of a plain tensor that requires gradients")
    return local_tokens(given, order_of(x).mesh, dim, order_of(x).layout)


def placed_tokens(local: Tensor, mesh: DeviceMesh, dim: int, seq_len: int) -> DTensor:
    """Make the DTensor of `seq_len` tokens on a mesh, whose shard on this rank is `local`."""
    dim %= local.ndim
    # Pass the global shape: `from_local` would assume shards of equal length.
    shape = (*local.shape[:dim], seq_len, *local.shape[dim + 1 :])
    # Those of PyTorch, which torch 2.11 does not trace: an empty dim counts as one of length 1.
    stride = strides([max(length, 1) for length in shape], tuple(range(len(shape))))
    return DTensor.from_local(
        local,
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def wrapped(local: Tensor, x: DTensor, dim: int) -> DTensor:
    """Make a sharded sequence of local results with the tokens of `x`."""
    made = placed_tokens(local, x.device_mesh, dim, x.shape[sequence_dim(x)])
    made.__class__ = type(x)
    return made


def summed(local: Tensor, x: DTensor) -> Tensor:
    """Sum over the ranks of the axis of a sharded sequence."""
    mesh, dtype = order_of(x).mesh, local.dtype
    if dtype == torch.bool:
        return sum_over_sequence(local.to(torch.uint8), mesh).to(dtype)
    return with_gradient(sum_over_sequence(local, mesh), x)
