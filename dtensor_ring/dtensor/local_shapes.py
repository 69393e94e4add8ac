"""The shapes of a rank's shards, for operations that are told the shape of the whole.

DTensor computes such a shape from the place of a rank, as if the sequence were cut into equal
pieces in rank order. Of an uneven layout, whose shards have other lengths, its mesh refuses that,
see Note [Token meshes]. Here the shard of the input tells its length. Backward has many of these
operations: that of a sum over features expands, that of an index fills a tensor of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dtensor_ring.compute.memory import strides
from dtensor_ring.dtensor.annotation import tokens_of
from dtensor_ring.dtensor.sequence_order import own_tokens, refusal, same_order, sequence_dim
from dtensor_ring.planning.layout import UNEVEN

aten = torch.ops.aten


def of_own_shard(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation of `SHAPED` on uneven shards; on others, return `NotImplemented`."""
    sharded = (x for x in args if isinstance(x, DTensor) and x.placements[0].is_shard())
    dtensor = next(sharded, None)
    if dtensor is None or not _is_uneven(dtensor) or sequence_dim(dtensor) < 0:
        return NotImplemented
    shaped = SHAPED[op](dtensor, sequence_dim(dtensor), *args)
    if shaped is None:
        return NotImplemented
    dim, local_args = shaped
    local = op(*local_args, **kwargs)
    # The strides of the whole are those that the operation gives a tensor without content.
    whole = op(*(_without_content(arg) for arg in args), **kwargs)
    meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
    spec = DTensorSpec(dtensor._spec.mesh, (Shard(dim),), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _is_uneven(x: DTensor) -> bool:
    tokens = tokens_of(x._spec.mesh)
    return tokens is not None and isinstance(tokens.layout, UNEVEN)


def _without_content(arg: Any) -> Any:
    if not isinstance(arg, DTensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")


Found = tuple[int, tuple[Any, ...]] | None
"""The dimension of the sequence in the result, and the arguments for this rank's shard."""


def _sized(x: DTensor, dim: int, sizes: Sequence[int], out: int) -> list[int]:
    """Return sizes with the length of this rank's shard at the dimension `out`."""
    return [*sizes[:out], x._local_tensor.shape[dim], *sizes[out + 1 :]]


def _expanded(x: DTensor, dim: int, given: Any, sizes: Sequence[int], *how: Any) -> Found:
    out = dim + len(sizes) - x.ndim
    if sizes[out] not in (-1, x.shape[dim]):
        return None
    return out, (x._local_tensor, _sized(x, dim, sizes, out), *how)


def _viewed(x: DTensor, dim: int, given: Any, sizes: Sequence[int]) -> Found:
    """Dimensions before the sequence must hold as many elements as they did, and so those after."""
    # Of equal ones among them, any may be the sequence: its length is 1.
    known = prod(size for size in sizes if size != -1)
    whole = [x.numel() // max(known, 1) if size == -1 else size for size in sizes]
    before = prod(x.shape[:dim])
    for out, size in enumerate(whole):
        if size == x.shape[dim] and prod(whole[:out]) == before:
            return out, (x._local_tensor, _sized(x, dim, whole, out))
    return None


def _new(x: DTensor, dim: int, given: Any, sizes: Sequence[int], *content: Any) -> Found:
    """Of another shape, a new tensor is whole on every rank."""
    if tuple(sizes) != tuple(x.shape):
        return None
    return dim, (x._local_tensor, _sized(x, dim, sizes, dim), *content)


def _new_strided(x: DTensor, dim: int, given: Any, sizes: Sequence[int], stride: Any) -> Found:
    if tuple(sizes) != tuple(x.shape):
        return None
    own = _sized(x, dim, sizes, dim)
    # The shard is dense with its dims in the memory order of the whole: strides of the whole
    # would leave gaps.
    order = tuple(sorted(range(len(own)), key=lambda place: -stride[place]))
    return dim, (x._local_tensor, own, strides(own, order))


def _selected(x: DTensor, dim: int, given: Any, sizes: Sequence[int], *where: Any) -> Found:
    selected = where[0] % len(sizes)
    # The result has the dimension again that `select` took away, before or after the tokens.
    out = dim + (selected <= dim)
    return out, (x._local_tensor, _sized(x, dim, sizes, out), *where)


def _sliced(x: DTensor, dim: int, given: Any, sizes: Sequence[int], *where: Any) -> Found:
    if where[0] % len(sizes) == dim:
        return None
    return dim, (x._local_tensor, _sized(x, dim, sizes, dim), *where)


def _scattered(x: DTensor, dim: int, into: Any, along: int, *others: Any) -> Found:
    """What a sequence is scattered into may be whole, as the zeros that backward makes are."""
    if along % into.ndim == dim or into.shape[dim] != x.shape[dim]:
        return None
    return dim, (_own(into, x, dim), along, *(_own(other, x, dim) for other in others))


def _own(given: Any, x: DTensor, dim: int) -> Any:
    """Return this rank's tokens of an argument: a sequence in the same order, or a whole tensor."""
    if not isinstance(given, DTensor):
        return given
    if not given.placements[0].is_shard():
        return own_tokens(given._local_tensor, x, dim)
    if not same_order(given, x) or sequence_dim(given) != dim:
        raise refusal(x, "scatter of sequences in two orders")
    return given._local_tensor


SHAPED: dict[Any, Callable[..., Found]] = {
    aten.new_empty.default: _new,
    aten.new_ones.default: _new,
    aten.new_zeros.default: _new,
    aten.new_full.default: _new,
    aten.new_empty_strided.default: _new_strided,
    aten.expand.default: _expanded,
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.select_backward.default: _selected,
    aten.slice_backward.default: _sliced,
    aten.scatter.src: _scattered,
    aten.scatter.value: _scattered,
}
