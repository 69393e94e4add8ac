"""Sums and extremes over a sharded sequence, its values, and losses of its tokens.

Of a sum, each rank sends its own. See Note [Right or refused].
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_ring.dtensor.aligned import lined_up
from dtensor_ring.dtensor.sequence_order import (
    first_of,
    own_rank,
    own_tokens,
    refusal,
    sequence_dim,
    summed,
    whole,
    wrapped,
)

WEIGHTS = "weight", "pos_weight"


def _values(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return func(whole(x), *args, **kwargs)


def _reduce(
    func: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any
) -> Any:
    """Reduce over the sequence, and any other dimensions."""
    dims = _dims(kwargs.pop("axis", dim), x.ndim)
    keepdim = kwargs.pop("keepdims", keepdim)
    if sequence_dim(x) not in dims and not (sequence_dim(x) < 0 and len(dims) == x.ndim):
        return NotImplemented
    if kwargs:
        raise refusal(x, f"{func.__name__} with {sorted(kwargs)}")
    local = x.to_local() if dtype is None else x.to_local().to(dtype)
    return _REDUCTIONS[func.__name__](local, dims, keepdim, x)


def _dims(dim: Any, ndim: int) -> list[int]:
    """Return the dimensions of a reduction, from the front; all if none is named."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(ndim))
    return [d % ndim for d in (dim if isinstance(dim, (list, tuple)) else (dim,))]


def _sum(local: Tensor, dims: list[int], keepdim: bool, x: DTensor) -> Tensor:
    """Sum in float32 or wider, and round once."""
    is_short = local.is_floating_point() and local.dtype.itemsize < 4
    wide = local.sum(dims, keepdim, dtype=torch.float32 if is_short else None)
    total = summed(wide, x)
    return total.to(local.dtype) if is_short else total


def _mean(local: Tensor, dims: list[int], keepdim: bool, x: DTensor) -> Tensor:
    if not (local.is_floating_point() or local.is_complex()):
        raise RuntimeError(f"mean(): the dtype must be floating or complex, got {local.dtype}")
    return _sum(local / prod(x.shape[d] for d in dims), dims, keepdim, x)


def _any(local: Tensor, dims: list[int], keepdim: bool, x: DTensor) -> Tensor:
    return summed((local != 0).sum(dims, keepdim), x) > 0


def _all(local: Tensor, dims: list[int], keepdim: bool, x: DTensor) -> Tensor:
    return summed((local == 0).sum(dims, keepdim), x) == 0


def _extreme(largest: bool) -> Callable[..., Tensor]:
    """Return the reduction to the largest, or smallest, of the extremes of all ranks."""

    def reduce(local: Tensor, dims: list[int], keepdim: bool, x: DTensor) -> Tensor:
        best = _best(local.detach(), dims, x, largest)
        if local.requires_grad and torch.is_grad_enabled():
            # As in PyTorch, equal ones share the gradient, wherever they are.
            is_best = local.detach() == best
            count = summed(is_best.sum(dims, keepdim=True), x)
            share = summed(torch.where(is_best, local, 0).sum(dims, keepdim=True), x) / count
            best = _WithGradientOf.apply(share, best)
        return best if keepdim else best.squeeze(dims)

    return reduce


def _best(local: Tensor, dims: list[int], x: DTensor, largest: bool) -> Tensor:
    """Return the extreme of all ranks, with dimensions of length 1 where it was reduced."""
    if local.numel():
        own = (local.amax if largest else local.amin)(dims, keepdim=True)
    else:  # a rank without tokens
        shape = [1 if d in dims else length for d, length in enumerate(local.shape)]
        own = local.new_full(shape, _bound(local.dtype, not largest))
    size, rank = x.device_mesh.size(), own_rank(x)
    # Each place is filled on one rank, and zeros add nothing: one sum gathers all extremes.
    by_rank = own.new_zeros((size, *own.shape))
    by_rank[rank] = own
    everyone = summed(by_rank, x)
    return everyone.amax(0) if largest else everyone.amin(0)


def _bound(dtype: torch.dtype, largest: bool) -> float | bool:
    """Return the largest, or the smallest, number of a dtype."""
    if dtype == torch.bool:
        return largest
    if dtype.is_floating_point:
        return float("inf") if largest else -float("inf")
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


class _WithGradientOf(torch.autograd.Function):
    """The second input, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "any": _any,
    "all": _all,
    "amax": _extreme(True),
    "amin": _extreme(False),
}


def _max(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not isinstance(x, DTensor):
        return NotImplemented
    return _extreme(func.__name__ == "max")(x.to_local(), list(range(x.ndim)), False, x)


def _loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the loss of each token by the function, then sum or average over all ranks."""
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    x, reduction = given["input"], given["reduction"]
    if not isinstance(x, DTensor) or sequence_dim(x) < 0 or given.get("size_average") is not None:
        raise refusal(first_of((*args, *kwargs.values())), func.__name__)
    is_labelled = "ignore_index" in given
    dim = sequence_dim(x)
    if is_labelled and dim == 1 and x.ndim > 1:
        raise refusal(x, f"{func.__name__}, whose classes are in dim 1,")
    target = given["target"]
    # Class labels have no class dimension.
    of_target = dim - (dim > 1) if is_labelled and target.ndim < x.ndim else dim
    local = own_tokens(target, x, of_target)
    given |= {"input": x.to_local(), "target": local, "reduction": "none"}
    if not is_labelled:  # weights of labels have no tokens
        given |= {name: _own_weights(given[name], x) for name in WEIGHTS if name in given}
    losses = func(**given)
    dim -= dim > 1 and losses.ndim < x.ndim
    if reduction == "none":
        return wrapped(losses, x, dim)
    total = _sum(losses, list(range(losses.ndim)), False, x)
    if reduction == "sum":
        return total
    if reduction == "batchmean":
        return total / x.shape[0]
    if is_labelled and not local.is_floating_point():
        if given.get("weight") is not None:
            raise refusal(x, f"{func.__name__} with weight and reduction='mean'")
        return total / summed((local != given["ignore_index"]).sum(), x)
    if func in (F.mse_loss, F.l1_loss) and given["weight"] is not None:
        return total / summed(given["weight"].sum(), x)
    # Of all ranks: this one may have no token.
    beside = (length for d, length in enumerate(losses.shape) if d != dim)
    return total / (prod(beside) * x.shape[sequence_dim(x)])


def _own_weights(weights: Any, x: DTensor) -> Any:
    """Return the weights of this rank's numbers, which line up by broadcasting."""
    found = lined_up(weights, x)
    return found.to_local() if isinstance(found, DTensor) else found


# By the functions that PyTorch hands over.
RESULTS: dict[Any, Callable[..., Any]] = {
    getattr(place, name): _reduce for name in _REDUCTIONS for place in (Tensor, torch)
}
RESULTS |= {getattr(place, name): _max for name in ("max", "min") for place in (Tensor, torch)}
RESULTS |= dict.fromkeys(
    (
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
    ),
    _values,
)
RESULTS |= dict.fromkeys(
    (
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.kl_div,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
    ),
    _loss,
)
