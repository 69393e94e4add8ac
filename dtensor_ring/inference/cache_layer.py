"""The cached keys and values of one layer, on one rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_ring.inference.turns import Turns
from dtensor_ring.ops.check import check_strided

SEQUENCE = 2  # the dim of the columns


class CacheLayer:
    """Keys `(B, Nk, C, H)` and values `(B, Nv, C, Hv)` of a layer: C columns of this rank.

    A `ShardedCache` makes its layers. They may differ in heads, head dims, dtypes and devices.

    Attributes:
        number: the index of the layer.
        capacities: the number of columns that fit into the memory of each rank.
    """

    def __init__(self, number: int, turns: Turns) -> None:
        self.number, self._turns = number, turns
        self.reset()

    def reset(self) -> None:
        """Forget all columns, and free their memory."""
        self._buffers: tuple[Tensor, ...] = ()
        self._rows: Tensor | None = None  # selected rows that are not copied yet
        self.capacities: tuple[int, ...] = (0,) * self._turns.table.world_size

    @property
    def bytes_per_column(self) -> int:
        """Return the bytes of one column in all sequences; 0 before the first append."""
        batch = self._turns.batch or 0  # selected rows count, though copied later
        return sum(batch * x.shape[1] * x.shape[3] * x.itemsize for x in self._buffers)

    @property
    def keys(self) -> Tensor:
        """Return the keys of this rank, `(B, Nk, C, H)`, a view of the cache's memory.

        Raises:
            ValueError: before the first append.
        """
        return self._columns()[0]

    @property
    def values(self) -> Tensor:
        """Return the values of this rank, `(B, Nv, C, Hv)`, a view of the cache's memory.

        Raises:
            ValueError: before the first append.
        """
        return self._columns()[1]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the tokens of the current turn.

        Args:
            key: `(B, Nk, L, H)`: this rank's shard of a sharded turn, otherwise all tokens.
            value: `(B, Nv, L, Hv)`.

        Returns:
            The keys and values of this rank, past and new, `(B, Nk, C, H)` and `(B, Nv, C, Hv)`:
            views of the cache's memory, in the order of positions.

        Raises:
            ValueError: if this layer has appended the turn already, the tensors do not have the
                length of the turn, their shape, dtype or device differs from the cached ones, or
                they need a gradient.
            TypeError: if one of them is not a plain tensor.
        """
        turn, given = self._turns.of_layer(self.number), (key, value)
        for name, x in (("key", key), ("value", value)):
            _check(name, x, turn.num_given)
        self._check_known(key, value)
        self._reorder()
        with torch.no_grad():
            self._grow(given, turn.cols[0], turn.capacities[self._turns.rank])
            for buffer, x in zip(self._buffers, given, strict=True):
                col = turn.cols[0]
                for begin, end in turn.kept:
                    _cols(buffer, col, end - begin).copy_(_cols(x, begin, end - begin))
                    col += end - begin
        self.capacities, self._turns.batch = turn.capacities, key.shape[0]
        self._turns.done(self.number)
        return self._columns()

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order.

        The layer copies them at its next use. So no lack of memory can make this fail in some
        layers only, and only one layer at a time needs memory for a second copy.
        """
        if self._buffers:
            before = self._rows
            self._rows = rows if before is None else before[rows.to(before.device)]

    def shrink(self, capacities: tuple[int, ...]) -> None:
        """Free memory beyond `capacities`, which a dropped turn had allocated."""
        if not any(capacities):  # the dropped turn was the first
            self.reset()
        elif self._buffers and self._buffers[-1].shape[SEQUENCE] > capacities[self._turns.rank]:
            with torch.inference_mode(False), torch.no_grad():
                kept = capacities[self._turns.rank]
                self._buffers = tuple(_cols(x, 0, kept).clone() for x in self._buffers)
        self.capacities = capacities

    def _reorder(self) -> None:
        """Copy the rows that `select` chose."""
        if self._rows is not None:
            with torch.inference_mode(False), torch.no_grad():
                rows = self._rows
                self._buffers = tuple(x.index_select(0, rows.to(x.device)) for x in self._buffers)
            self._rows = None

    def _columns(self) -> tuple[Tensor, Tensor]:
        if not self._buffers:
            raise ValueError(f"layer {self.number} has no keys and values yet, append brings them")
        self._reorder()
        num_cols = self._turns.num_cols(self.number)
        keys, values = self._buffers
        return _cols(keys, 0, num_cols), _cols(values, 0, num_cols)

    def _grow(self, like: tuple[Tensor, ...], num_cols: int, capacity: int) -> None:
        """Allocate memory for `capacity` columns, and copy the `num_cols` columns to it."""
        if self._buffers and self._buffers[-1].shape[SEQUENCE] >= capacity:
            return
        grown = []
        # Tensors made in inference mode are read-only outside of it.
        with torch.inference_mode(False):
            for x in self._buffers or like:
                grown.append(x.new_empty(*x.shape[:2], capacity, x.shape[3]))
        for x, larger in zip(self._buffers, grown, strict=False):
            _cols(larger, 0, num_cols).copy_(_cols(x, 0, num_cols))
        self._buffers = tuple(grown)

    def _check_known(self, key: Tensor, value: Tensor) -> None:
        """Refuse shapes, dtypes or devices that differ from the cached ones."""
        batch = key.shape[0] if self._turns.batch is None else self._turns.batch
        if not key.shape[0] == value.shape[0] == batch:
            raise ValueError(
                f"key and value must be of {batch} sequences, got {key.shape[0]} and "
                f"{value.shape[0]}; select and repeat change their number, reset forgets them"
            )
        for name, x, known in zip(("key", "value"), (key, value), self._buffers, strict=False):
            here = x.shape[1], x.shape[3], x.dtype, x.device
            if here != (known.shape[1], known.shape[3], known.dtype, known.device):
                raise ValueError(
                    f"layer {self.number} holds {name}s of {_described(known)}, got "
                    f"{_described(x)}; cache.reset() forgets what is there"
                )


def _cols(x: Tensor, first: int, num_cols: int) -> Tensor:
    """Return columns of a tensor; `narrow` is faster than slices in each step of each layer."""
    return x.narrow(SEQUENCE, first, num_cols)


def _check(name: str, x: Tensor, num_tokens: int) -> None:
    """Refuse anything but a plain tensor of `num_tokens` tokens."""
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        fix = "; use .to_local()" if isinstance(x, DTensor) else ""
        raise TypeError(f"{name} must be a plain tensor, got {type(x).__name__}{fix}")
    check_strided(name, x)
    if x.ndim != 4 or x.shape[SEQUENCE] != num_tokens:
        raise ValueError(
            f"{name} must be (B, N, L, H) with the {num_tokens} tokens of this turn, got "
            f"{tuple(x.shape)}; of a dealt turn a rank appends its own shard, else all tokens"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} needs a gradient, which a cache has none of: use torch.no_grad()")


def _described(x: Tensor) -> str:
    return f"{x.shape[1]} heads of {x.shape[3]}, {x.dtype} on {x.device}"
