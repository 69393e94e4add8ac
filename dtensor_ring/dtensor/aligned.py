"""Lines up what is computed together with a sharded sequence: plain tensors, other sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dtensor_ring.dtensor.annotation import tokens_of
from dtensor_ring.dtensor.sequence_order import (
    first_of,
    order_of,
    own_tokens,
    refusal,
    same_order,
    sequence_dim,
    wrapped,
)

# Functions of elements that line up by broadcasting, by name without underscores.
ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "true_divide", "floor_divide", "remainder")
REVERSED = ("radd", "rsub", "rmul", "rtruediv")
CHOICES = ("maximum", "minimum", "fmax", "fmin", "clamp", "where", "masked_fill")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "isclose")
LOGIC = ("logical_and", "logical_or", "logical_xor", "and", "or", "xor")
OTHERS = ("fmod", "pow", "lerp", "atan2")
ELEMENTWISE = (*ARITHMETIC, *REVERSED, *CHOICES, *COMPARISONS, *LOGIC, *OTHERS)


def aligned(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Shard the whole plain tensors among the arguments of an elementwise function.

    A plain tensor is the same on every rank. A DTensor cannot be combined with one, and DTensor
    would take its tokens in rank order.
    """
    name = getattr(func, "__name__", "").strip("_").removeprefix("i")
    first = first_of(args)
    if first is None or sequence_dim(first) < 0:
        return args, kwargs
    args = tuple(_on_mesh_of(given, first) for given in args)
    if name in ELEMENTWISE:
        args = tuple(lined_up(given, first) for given in args)
    return args, kwargs


def _on_mesh_of(given: Any, x: DTensor) -> Any:
    """Put a sequence of the same order on the mesh of another, if it needs no gradient."""
    if not isinstance(given, DTensor) or given.device_mesh == x.device_mesh:
        return given
    if not same_order(given, x) or (given.requires_grad and torch.is_grad_enabled()):
        return given
    # Nothing moves: the same shard, as a tensor on the other mesh.
    made = DTensor(
        given._local_tensor, replace(given._spec, mesh=x.device_mesh), requires_grad=False
    )
    made.__class__ = type(x)
    return made


def lined_up(given: Any, x: DTensor) -> Any:
    """Return an argument beside a sharded sequence as one that DTensor can combine with it."""
    if isinstance(given, DTensor):
        is_whole = tokens_of(given.device_mesh) is None and all(
            where.is_replicate() for where in given.placements
        )
        if not is_whole or given.device_mesh != order_of(x).mesh:
            return given
        given = given.to_local()
    if not isinstance(given, Tensor):
        return given
    dim = sequence_dim(x) - (x.ndim - given.ndim)
    has_tokens = dim >= 0 and given.numel() > 1 and given.shape[dim] > 1
    if not has_tokens and given.requires_grad and torch.is_grad_enabled():
        # A rank's gradient would cover its own tokens only.
        raise refusal(x, "a function of this and of a plain tensor that requires gradients")
    if given.ndim == 0 or given.numel() == 1:
        return given
    if not has_tokens:
        return DTensor.from_local(given, x.device_mesh, [Replicate()], run_check=False)
    return wrapped(own_tokens(given, x, dim), x, dim)
