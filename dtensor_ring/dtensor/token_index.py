"""Tokens of a sharded sequence by index: one, a range, a list, or one of each of several rows.

Only those that were asked for are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from dtensor_ring.dtensor.sequence_order import (
    first_of,
    order_of,
    own_rank,
    own_tokens,
    refusal,
    sequence_dim,
    summed,
    whole,
    wrapped,
)
from dtensor_ring.planning.layout import run_positions


def take(x: DTensor, positions: Sequence[int] | np.ndarray) -> Tensor:
    """Return tokens by position, in place of the whole sequence in its dimension.

    Each rank puts its own tokens into a tensor of zeros, and the sum over ranks has all of them.
    """
    dim = sequence_dim(x)
    length, asked = x.shape[dim], np.asarray(positions, dtype=np.int64)
    wrong = asked[(asked < -length) | (asked >= length)]
    if wrong.size:
        raise IndexError(f"index {wrong[0]} is out of bounds for {length} tokens of dim {dim}")
    asked = asked % max(length, 1)
    if 2 * len(asked) >= length:  # a gather sends each token once, a sum twice
        return whole(x).index_select(dim, torch.as_tensor(asked, device=x.device))
    local = x.to_local()
    own = run_positions(order_of(x).layout.runs(own_rank(x), x.device_mesh.size(), length))
    # Positions of a rank ascend, so each one asked for is found, or not, by bisection.
    # The tokens 6, 1 and 3 of eight, in zigzag over two ranks, of which rank 0 has 0 1 6 7:
    #     rank 0   x6 x1  0
    #     rank 1    0  0 x3
    #     sum      x6 x1 x3
    columns = np.searchsorted(own, asked)
    is_own = own[np.minimum(columns, len(own) - 1)] == asked if len(own) else asked < 0
    rows = local.narrow(dim, 0, 0)
    shape = (*local.shape[:dim], len(asked), *local.shape[dim + 1 :])
    result = local.new_zeros(shape) + 0 * rows.sum().to(local.dtype)  # it needs a gradient, too
    if is_own.any():
        chosen = torch.as_tensor(np.flatnonzero(is_own), device=x.device)
        kept = local.index_select(dim, torch.as_tensor(columns[is_own], device=x.device))
        result = result.index_copy(dim, chosen, kept)
    return summed(result, x)


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
        if first_of((*args, *(kwargs or {}).values())) is not None:
            return NotImplemented  # the sequence beside it knows how to line it up, or refuses
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            # Compilers go up by `_base`, which ends at a tensor that is no view.
            is_base = func == _BASE
            return out.as_subclass(cls) if not is_base and _is_view_of(out, args) else out


_BASE = vars(torch._C.TensorBase)["_base"].__get__


def _as_copy(tokens: Tensor) -> Tensor:
    """Return tokens that must not be written to.

    Raises:
        NotImplementedError: in a graph, which breaks here, or fails if it must not break.
    """
    if type(tokens) is not Tensor:  # a compiler's
        raise NotImplementedError(
            "a graph cannot have a view of some tokens of a sharded sequence: take a copy by a "
            "list of positions, x[:, [0, 1]], make it whole first, unshard_sequence(x, dim), or of "
            "logits, ask for the last ones by logits_to_keep="
        )
    return tokens.as_subclass(TokenCopy)


def _is_view_of(out: Any, args: Any) -> bool:
    """Return whether a result has the memory of the first argument."""
    first = args[0] if args else None
    return (
        isinstance(out, Tensor)
        and isinstance(first, TokenCopy)
        and out.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    )


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
        tokens, entries[place] = take(x, range(x.shape[dim])[entry]), slice(None)
    else:
        tokens, entries[place] = take(x, _listed(x, entry)), slice(None)
    result = tokens[tuple(entries)]
    return _as_copy(result) if isinstance(entry, (int, slice)) else result


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
        NotImplementedError: in a graph, which breaks here, if they are a tensor.
    """
    if isinstance(entry, DTensor):
        raise refusal(x, "indexing by a DTensor")
    if isinstance(entry, FakeTensor):
        raise NotImplementedError(
            "a graph does not know the positions in a tensor: index a sharded sequence by a list "
            "of numbers, x[:, [0, 1]], or make it whole first, unshard_sequence(x, dim)"
        )
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
    # Rows that ask for the same token fetch it once.
    distinct, whose = np.unique(positions, return_inverse=True)
    tokens = take(x, distinct)
    return tokens[torch.as_tensor(rows), torch.as_tensor(whose)]


def _select(func: Any, x: Any, dim: int, index: int) -> Any:
    return _along(x, dim, lambda: _as_copy(take(x, [index]).squeeze(sequence_dim(x))))


def _narrow(func: Any, x: Any, dim: int, start: int, length: int) -> Any:
    return _along(x, dim, lambda: _as_copy(take(x, range(start, start + length))))


def _index_select(func: Any, x: Any, dim: int, index: Tensor) -> Any:
    return _along(x, dim, lambda: take(x, _listed(x, index)))


def _along(x: Any, dim: int, compute: Callable[[], Any]) -> Any:
    """Compute along the dimension of the sequence; leave others to DTensor."""
    if not isinstance(x, DTensor) or dim % x.ndim != sequence_dim(x):
        return NotImplemented
    return compute()


def _refused_along(func: Any, x: Any, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
    def refuse() -> Any:
        raise refusal(x, func.__name__)

    return _along(x, dim, refuse)


def _gather(func: Any, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    """Gather along another dimension: the index has the tokens of the sequence, too."""
    if not isinstance(x, DTensor) or sequence_dim(x) < 0 or dim % x.ndim == sequence_dim(x):
        return NotImplemented
    at = sequence_dim(x)
    return wrapped(func(x.to_local(), dim, own_tokens(index, x, at), **kwargs), x, at)


def _take_along_dim(func: Any, x: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return NotImplemented
    return _gather(lambda local, at, index: func(local, index, at), x, dim, indices)


# By the functions that PyTorch hands over.
INDEXING: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.select: _select,
    torch.select: _select,
    Tensor.narrow: _narrow,
    torch.narrow: _narrow,
    Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    Tensor.gather: _gather,
    torch.gather: _gather,
    Tensor.take_along_dim: _take_along_dim,
    torch.take_along_dim: _take_along_dim,
    Tensor.unbind: _refused_along,
    torch.unbind: _refused_along,
    Tensor.__iter__: _refused_along,
    Tensor.unflatten: _refused_along,
    torch.unflatten: _refused_along,
}
