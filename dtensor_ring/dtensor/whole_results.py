"""What a sharded sequence gives as a whole: tokens, sums over the sequence, and losses.

Each result is a plain tensor, the same on every rank. Only what it needs is sent: of tokens, those
that were asked for; of a sum, the sum of each rank. See Note [Right or refused].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.dtensor.annotation import Tokens, group_of, tokens_of
from dtensor_ring.dtensor.gather import sum_over_sequence, whole_sequence
from dtensor_ring.planning.layout import Layout, Run, run_positions


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


def _tokens(x: DTensor) -> Tokens:
    tokens = tokens_of(x.device_mesh)
    assert tokens is not None, "a sharded sequence is on a token mesh"
    return tokens


def whole(x: DTensor) -> Tensor:
    """Return the whole sequence in its order, see `unshard_sequence`."""
    dim = sequence_dim(x)
    if dim < 0:
        raise refusal(x, "full_tensor")
    group = group_of(x.device_mesh, 0)
    found = whole_sequence(x.to_local(), dim, group, x.shape[dim], _tokens(x).layout)
    return _with_gradient(found, x)


def _with_gradient(result: Tensor, x: DTensor) -> Tensor:
    """Give a whole result the gradient that the sequence is to have.

    What made it sums the gradients of all ranks, which then average over the axis. Of a tensor that
    no model on local shards made, it is that of DTensor: of one loss, not of one for each rank.
    """
    if _tokens(x).averages or not result.requires_grad:
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


def local_tokens(tensor: Tensor, rank: int, size: int, dim: int, layout: Layout) -> Tensor:
    """Return the tokens of a rank of a whole tensor, in contiguous memory."""
    parts = [
        # Runs are strided views, so `cat` makes the only copy.
        tensor.narrow(dim, run.start, (run.length - 1) * run.stride + 1)[
            (slice(None),) * (dim % tensor.ndim) + (slice(None, None, run.stride),)
        ]
        for run in layout.runs(rank, size, tensor.shape[dim])
    ]
    return torch.cat(parts or [tensor.narrow(dim, 0, 0)], dim)


def positions_of(runs: Sequence[Run], device: torch.device | None = None) -> Tensor:
    """Return the positions of runs, see `Layout.runs`, int64, `(L,)`.

    Example:
        >>> positions_of(Striped().runs(rank=1, world_size=2, seq_len=6)).tolist()
        [1, 3, 5]
    """
    parts = [
        torch.arange(x.start, x.start + x.length * x.stride, x.stride, device=device) for x in runs
    ]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def take(x: DTensor, positions: Sequence[int] | np.ndarray) -> Tensor:
    """Return tokens by position, in place of the whole sequence in its dimension.

    Each rank puts its own tokens into a tensor of zeros, and the sum over ranks has all of them.
    """
    dim, mesh = sequence_dim(x), _tokens(x).mesh
    length, asked = x.shape[dim], np.asarray(positions, dtype=np.int64)
    wrong = asked[(asked < -length) | (asked >= length)]
    if wrong.size:
        raise IndexError(f"index {wrong[0]} is out of bounds for {length} tokens of dim {dim}")
    asked = asked % max(length, 1)
    if 2 * len(asked) >= length:  # a gather sends each token once, a sum twice
        return whole(x).index_select(dim, torch.as_tensor(asked, device=x.device))
    local = x.to_local()
    own = run_positions(_tokens(x).layout.runs(mesh.get_local_rank(), mesh.size(), length))
    columns = np.searchsorted(own, asked)
    is_own = own[np.minimum(columns, len(own) - 1)] == asked if len(own) else asked < 0
    rows = local.narrow(dim, 0, 0)
    shape = (*local.shape[:dim], len(asked), *local.shape[dim + 1 :])
    result = local.new_zeros(shape) + 0 * rows.sum().to(local.dtype)  # it needs a gradient, too
    if is_own.any():
        chosen = torch.as_tensor(np.flatnonzero(is_own), device=x.device)
        kept = local.index_select(dim, torch.as_tensor(columns[is_own], device=x.device))
        result = result.index_copy(dim, chosen, kept)
    return _summed(result, x)


class TokenCopy(Tensor):
    """Tokens of a sharded sequence where PyTorch has a view: what is written would be lost."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_written = isinstance(args[0] if args else None, cls) and (
            name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        )
        if is_written and name != "requires_grad_" and not torch.compiler.is_compiling():
            raise ValueError(
                f"{name} would change a copy of tokens, and not the sharded sequence that they "
                "were taken from: clone() them first, or change the sequence as a whole, "
                "unshard_sequence(x, dim)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return out.as_subclass(cls) if _is_view_of(out, args) else out


def _is_view_of(out: Any, args: Any) -> bool:
    """Return whether a result has the memory of the first argument."""
    first = args[0] if args else None
    return (
        isinstance(out, Tensor)
        and isinstance(first, TokenCopy)
        and out.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    )


def _summed(local: Tensor, x: DTensor) -> Tensor:
    """Sum over the ranks of the axis of a sharded sequence."""
    mesh, dtype = _tokens(x).mesh, local.dtype
    if dtype == torch.bool:
        return sum_over_sequence(local.to(torch.uint8), mesh).to(dtype)
    return _with_gradient(sum_over_sequence(local, mesh), x)


RULES: dict[Any, Callable[..., Any]] = {}


def _rule(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for functions; it returns `NotImplemented` where it does not apply."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(funcs, rule))
        return rule

    return register


@_rule(Tensor.__getitem__)
def _getitem(func: Any, x: Any, index: Any) -> Any:
    """Index a sharded sequence: one token, a range or a list, beside any other basic index."""
    if not isinstance(x, DTensor) or sequence_dim(x) < 0:
        raise refusal(first_of((x, index)), "indexing")
    entries, dim = _entries(index, x.ndim), sequence_dim(x)
    place = _place_of(entries, dim)
    entry = entries[place]
    if entry == slice(None):
        return NotImplemented
    if any(isinstance(e, (Tensor, list, np.ndarray)) for i, e in enumerate(entries) if i != place):
        return _of_rows(x, entries, dim)
    if isinstance(entry, int):
        tokens, entries[place] = take(x, [entry]), 0
    elif isinstance(entry, slice):
        tokens, entries[place] = take(x, range(*entry.indices(x.shape[dim]))), slice(None)
    else:
        tokens, entries[place] = take(x, _listed(x, entry)), slice(None)
    result = tokens[tuple(entries)]
    return result.as_subclass(TokenCopy) if isinstance(entry, (int, slice)) else result


def _entries(index: Any, ndim: int) -> list[Any]:
    """Return an index with an entry for each dimension, without an ellipsis."""
    given = list(index) if isinstance(index, tuple) else [index]
    used = sum(x is not None and x is not Ellipsis for x in given)
    filling = [slice(None)] * (ndim - used)
    for i, x in enumerate(given):
        if x is Ellipsis:
            return [*given[:i], *filling, *given[i + 1 :]]
    return given + filling


def _place_of(entries: list[Any], dim: int) -> int:
    """Return the place in an index of the entry for a dimension: `None` adds one."""
    places = [i for i, x in enumerate(entries) if x is not None]
    return places[dim]


def _listed(x: DTensor, entry: Any) -> np.ndarray:
    """Return positions that are given as a list or a tensor.

    Raises:
        ValueError: if they are not integers in one dimension.
    """
    if isinstance(entry, Tensor) and isinstance(entry, DTensor):
        raise refusal(x, "indexing by a DTensor")
    found = np.asarray(entry.tolist() if isinstance(entry, Tensor) else entry)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise refusal(x, "indexing by a mask, or by several dimensions,")
    return found


def _of_rows(x: DTensor, entries: list[Any], dim: int) -> Tensor:
    """Return a token of each of several rows, `x[rows, positions]`, as poolers ask for."""
    if dim != 1 or len(entries) < 2 or any(e != slice(None) for e in entries[2:]):
        raise refusal(x, "this index")
    rows, positions = _listed(x, entries[0]), _listed(x, entries[1])
    if rows.shape != positions.shape:
        raise refusal(x, "this index")
    distinct, whose = np.unique(positions, return_inverse=True)
    tokens = take(x, distinct)
    return tokens[torch.as_tensor(rows), torch.as_tensor(whose)]


@_rule(Tensor.select, torch.select)
def _select(func: Any, x: Any, dim: int, index: int) -> Any:
    return _along(x, dim, lambda: take(x, [index]).squeeze(sequence_dim(x)).as_subclass(TokenCopy))


@_rule(Tensor.narrow, torch.narrow)
def _narrow(func: Any, x: Any, dim: int, start: int, length: int) -> Any:
    return _along(x, dim, lambda: take(x, range(start, start + length)).as_subclass(TokenCopy))


@_rule(Tensor.index_select, torch.index_select)
def _index_select(func: Any, x: Any, dim: int, index: Tensor) -> Any:
    return _along(x, dim, lambda: take(x, _listed(x, index)))


def _along(x: Any, dim: int, compute: Callable[[], Any]) -> Any:
    """Compute along the dimension of the sequence; leave others to DTensor."""
    if not isinstance(x, DTensor) or dim % x.ndim != sequence_dim(x):
        return NotImplemented
    return compute()


@_rule(Tensor.unbind, torch.unbind, Tensor.__iter__)
def _unbind(func: Any, x: Any, dim: int = 0) -> Any:
    def refuse() -> Any:
        raise refusal(x, func.__name__)

    return _along(x, dim, refuse)


@_rule(Tensor.unflatten, torch.unflatten)
def _unflatten(func: Any, x: Any, dim: int, sizes: Any) -> Any:
    def refuse() -> Any:
        raise refusal(x, "unflatten")

    return _along(x, dim, refuse)


@_rule(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__)
def _values(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return func(whole(x), *args, **kwargs)


@_rule(Tensor.sum, torch.sum, Tensor.mean, torch.mean, Tensor.any, torch.any, Tensor.all, torch.all)
@_rule(Tensor.amax, torch.amax, Tensor.amin, torch.amin)
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
    summed = _summed(wide, x)
    return summed.to(local.dtype) if is_short else summed


def _mean(local: Tensor, dims: list[int], keepdim: bool, x: DTensor) -> Tensor:
    if not (local.is_floating_point() or local.is_complex()):
        raise RuntimeError(f"mean(): the dtype must be floating or complex, got {local.dtype}")
    count = int(np.prod([x.shape[d] for d in dims]))
    return _sum(local / count, dims, keepdim, x)


def _any(local: Tensor, dims: list[int], keepdim: bool, x: DTensor) -> Tensor:
    return _summed((local != 0).sum(dims, keepdim), x) > 0


def _all(local: Tensor, dims: list[int], keepdim: bool, x: DTensor) -> Tensor:
    return _summed((local == 0).sum(dims, keepdim), x) == 0


def _extreme(largest: bool) -> Callable[..., Tensor]:
    """Return the reduction to the largest, or smallest, of the extremes of all ranks."""

    def reduce(local: Tensor, dims: list[int], keepdim: bool, x: DTensor) -> Tensor:
        if not local.numel():  # a rank without tokens
            bounds = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
            low = -float("inf") if x.is_floating_point() else bounds.min
            high = float("inf") if x.is_floating_point() else bounds.max
            shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
            found = local.new_full(shape, low if largest else high) + 0 * local.sum()
            found = found if keepdim else found.squeeze(dims)
        else:
            found = (local.amax if largest else local.amin)(dims, keepdim)
        size = x.device_mesh.size()
        rank = torch.arange(size, device=local.device) == _tokens(x).mesh.get_local_rank()
        # Infinities times zero would be no number.
        by_rank = torch.where(rank.view(-1, *[1] * found.ndim), found, torch.zeros_like(found))
        return (Tensor.amax if largest else Tensor.amin)(_summed(by_rank, x), 0)

    return reduce


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "any": _any,
    "all": _all,
    "amax": _extreme(True),
    "amin": _extreme(False),
}


@_rule(Tensor.max, torch.max, Tensor.min, torch.min)
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
    # Labels of classes have no dimension of their own for them.
    of_target = dim - (dim > 1) if is_labelled and target.ndim < x.ndim else dim
    local = _own_tokens(target, x, of_target)
    given |= {"input": x.to_local(), "target": local, "reduction": "none"}
    losses = func(**given)
    if reduction == "none":
        return _wrapped(losses, x, dim - (dim > 1) if losses.ndim < x.ndim else dim)
    total = _sum(losses, list(range(losses.ndim)), False, x)
    if reduction == "sum":
        return total
    if reduction == "batchmean":
        return total / x.shape[0]
    if is_labelled and not local.is_floating_point():
        if given.get("weight") is not None:
            raise refusal(x, f"{func.__name__} with weight and reduction='mean'")
        return total / _summed((local != given["ignore_index"]).sum(), x)
    return total / (losses.numel() // max(x.to_local().shape[dim], 1) * x.shape[dim])


RULES.update(
    dict.fromkeys(
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
)


def _own_tokens(given: Any, x: DTensor, dim: int) -> Tensor:
    """Return this rank's tokens of another argument: a sharded sequence, or a whole tensor."""
    if isinstance(given, DTensor):
        if not same_order(given, x) or sequence_dim(given) != dim:
            raise refusal(x, "a function of this and of a DTensor that is placed otherwise")
        return given.to_local()
    size = x.shape[sequence_dim(x)]
    if given.ndim <= dim or given.shape[dim] != size:
        raise refusal(x, f"a function of this and of a plain tensor of {tuple(given.shape)}")
    mesh = _tokens(x).mesh
    return local_tokens(given, mesh.get_local_rank(), mesh.size(), dim, _tokens(x).layout)


def _wrapped(local: Tensor, x: DTensor, dim: int) -> DTensor:
    """Make a sharded sequence of local results with the tokens of `x`."""
    shape = list(local.shape)
    shape[dim] = x.shape[sequence_dim(x)]
    meta = torch.empty(shape, device="meta")
    how = {"run_check": False, "shape": meta.shape, "stride": meta.stride()}
    made = DTensor.from_local(local, x.device_mesh, [Shard(dim)], **how)
    made.__class__ = type(x)
    return made


# Functions of elements that line up by broadcasting, by name without underscores.
ELEMENTWISE = frozenset(
    """
    add sub mul div truediv rsub radd rmul rtruediv true_divide floor_divide pow remainder fmod
    eq ne lt le gt ge isclose maximum minimum fmax fmin clamp where masked_fill lerp atan2
    logical_and logical_or logical_xor and or xor gather take_along_dim
    """.split()  # noqa: SIM905 - a line for each family
)


def aligned(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Shard the whole plain tensors among the arguments of an elementwise function.

    A plain tensor is the same on every rank. A DTensor cannot be combined with one, and DTensor
    would take its tokens in rank order.
    """
    name = getattr(func, "__name__", "").strip("_").removeprefix("i")
    x = first_of(args)
    if x is None or sequence_dim(x) < 0:
        return args, kwargs
    args = tuple(_on_mesh_of(given, x) for given in args)
    return tuple(_lined_up(given, x) for given in args) if name in ELEMENTWISE else args, kwargs


def same_order(x: DTensor, y: DTensor) -> bool:
    """Return whether two sequences have the same tokens on each rank."""
    one, other = tokens_of(x.device_mesh), tokens_of(y.device_mesh)
    if one is None or other is None:
        return False
    return one.mesh == other.mesh and one.layout == other.layout


def _on_mesh_of(given: Any, x: DTensor) -> Any:
    """Put a sequence of the same order on the mesh of another, if it needs no gradient."""
    if not isinstance(given, DTensor) or given.device_mesh == x.device_mesh:
        return given
    if not same_order(given, x) or (given.requires_grad and torch.is_grad_enabled()):
        return given
    made = DTensor(
        given._local_tensor, replace(given._spec, mesh=x.device_mesh), requires_grad=False
    )
    made.__class__ = type(x)
    return made


def _lined_up(given: Any, x: DTensor) -> Any:
    """Return an argument beside a sharded sequence as one that DTensor can combine with it."""
    if isinstance(given, DTensor):
        is_whole = tokens_of(given.device_mesh) is None and all(
            where.is_replicate() for where in given.placements
        )
        if not is_whole or given.device_mesh != _tokens(x).mesh:
            return given
        given = given.to_local()
    if not isinstance(given, Tensor) or given.ndim == 0 or given.numel() == 1:
        return given
    dim = sequence_dim(x) - (x.ndim - given.ndim)
    if dim < 0 or given.shape[dim] == 1:
        if given.requires_grad:
            raise refusal(x, "a function of this and of a plain tensor that requires gradients")
        from torch.distributed.tensor import Replicate

        return DTensor.from_local(given, x.device_mesh, [Replicate()], run_check=False)
    return _wrapped(_own_tokens(given, x, dim), x, dim)
