"""Keys and values of sequences that grow, sharded along the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.dtensor.annotation import axis_group, sequence_layout
from dtensor_ring.dtensor.arguments import as_flag
from dtensor_ring.inference.cache_layer import CacheLayer
from dtensor_ring.inference.turns import Turns
from dtensor_ring.ops.boundaries import INTEGERS
from dtensor_ring.planning.cache_table import CacheTable
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.ranges import as_count, as_int
from dtensor_ring.planning.run_table import as_layout

MAX_LAYERS = 2**16
"""Of a cache."""


class CacheUsage(NamedTuple):
    """Bytes of a cache on each rank; all ranks compute the same."""

    held: tuple[int, ...]
    """Allocated."""
    used: tuple[int, ...]
    """Of those, the ones that hold keys and values."""


class ShardedCache:
    """Keys and values of each layer of a model, each token's on one rank of a mesh axis.

    For a batch of sequences of one length. Tokens come in *turns*: `begin` says how many, and then
    each layer appends its keys and values once. A turn is dealt (each rank appends its shard, in
    the order of the layout), or not (all ranks append the same tokens, and their owners keep them).
    Who holds what is computed, on all ranks alike: no message is sent.

    A rank has memory for its tokens, and for the rest of the block that it is filling: at most for
    its part of the sequence and a block. It is given back by `reset`; by `crop`, what a turn took
    that is dropped whole. After a dealt turn there is room for no further token: the next turn
    takes more memory, and copies what there is, layer by layer. So a prompt in n chunks is copied
    (n - 1) / 2 times in all; fewer, larger chunks copy less.

    Args:
        mesh: the 1-D mesh of the axis.
        num_layers: layers of the model that keep keys and values.
        layout: how a turn is dealt, within itself: one whose runs are of neighbouring tokens, as
            "zigzag" or "block_cyclic:256". By default the axis's, zigzag if it has none.
        block: of tokens that are not dealt, how many one rank gets before they go to the rank with
            the fewest; its memory grows by as many.

    Raises:
        ValueError: if the mesh is not 1-D, a number is out of range, or the layout is unknown.
        TypeError: if an argument is of another type.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> cache = ShardedCache(mesh, num_layers=1)
        >>> cache.begin(6, dealt=True)
        >>> keys, values = cache[0].append(torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4))
        >>> cache.begin(1, dealt=False)
        >>> keys, values = cache[0].append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
        >>> keys.shape, cache.seq_len
        (torch.Size([1, 2, 7, 4]), 7)
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        num_layers: int,
        layout: Layout | str | None = None,
        block: int = 256,
    ) -> None:
        group = axis_group(mesh)
        num_layers = as_count("num_layers", num_layers, 1, MAX_LAYERS)
        self.mesh = mesh
        self.layout = as_layout(sequence_layout(mesh) or "zigzag" if layout is None else layout)
        self._turns = Turns(CacheTable.empty(group.size(), block), group.rank(), num_layers)
        self._layers = tuple(CacheLayer(number, self._turns) for number in range(num_layers))
        self._key_runs: tuple[CacheTable, int, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[CacheLayer]:
        return iter(self._layers)

    def __getitem__(self, number: int) -> CacheLayer:
        """The layer of that number.

        Raises:
            IndexError: if the cache has no layer of that number.
        """
        if not 0 <= as_int("number", number) < len(self._layers):
            raise IndexError(
                f"this cache has {len(self._layers)} layers, there is no layer {number}; a model "
                "needs a cache of as many layers as it has"
            )
        return self._layers[number]

    @property
    def table(self) -> CacheTable:
        """Which positions each rank holds, those of the turn that has begun included."""
        return self._turns.table

    @property
    def seq_len(self) -> int:
        """Tokens of each sequence, those of the turn that has begun included."""
        return self.table.seq_len

    @property
    def batch(self) -> int | None:
        """Sequences, `None` before the first ones came."""
        return self._turns.batch

    @property
    def key_runs(self) -> Tensor:
        """Start and length of the runs of positions that each rank holds, `(W, R, 2)`, int32.

        On the CPU, ascending; runs of no token fill it up. The last one of the first row may begin
        with a checksum of what `select` and its like did: attention compares it, so ranks that did
        otherwise are told. The same object until the next turn, crop or selection, so that what is
        planned with it is found again.
        """
        table, order = self.table, self._turns.order
        if self._key_runs is None or self._key_runs[0] is not table or self._key_runs[1] != order:
            self._key_runs = table, order, torch.tensor(table.marked(order), device="cpu")
        return self._key_runs[2]

    @property
    def query_runs(self) -> Tensor:
        """The runs of the tokens of the last turn, which was dealt, as `key_runs` has them.

        Raises:
            ValueError: if it was not dealt, or a crop came after it.
        """
        last = self._turns.last
        if last is None or not last.is_dealt:
            raise ValueError(
                "only the tokens of a dealt turn have runs: cache.begin(num_tokens, dealt=True)"
            )
        return torch.tensor(self.table.turn(last.begin), device="cpu")

    @property
    def positions(self) -> Tensor:
        """The position of each column of this rank, `(C,)`, int64, on the CPU."""
        return torch.from_numpy(self.table.positions(self._turns.rank))

    def begin(self, num_tokens: int, *, dealt: bool) -> None:
        """Begin a turn: each layer appends its tokens next.

        Args:
            num_tokens: of each sequence, on all ranks together.
            dealt: whether the layout deals them to the ranks; otherwise all ranks have them all.

        Raises:
            ValueError: if a layer has not appended the turn before, there is no token, or the
                layout cannot deal them.
            TypeError: if the number is not an integer.
        """
        self._turns.begin(num_tokens, self.layout if as_flag("dealt", dealt) else None)

    def crop(self, seq_len: int) -> None:
        """Keep the first tokens of each sequence only; memory stays for those that follow.

        A crop to where the last turn began takes it back, whether it failed in some layer or not:
        with the memory that it took, and if it was the first one, with the number of sequences.

        Raises:
            ValueError: if it is negative, more than there is, or within a turn that some layers did
                not append.
            TypeError: if it is not an integer.
        """
        dropped = self._turns.taken_back(seq_len)
        if dropped is not None:
            for layer in self._layers:
                layer.shrink(dropped.capacities_before)
        self._turns.crop(seq_len)

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order.

        A layer copies them when it is used next, one after the other: each needs memory for its
        own rows a second time while it does.

        Args:
            rows: numbers of sequences, `(B',)`, int32 or int64; one may be there several times.

        Raises:
            ValueError: if there is no such sequence, or a turn is not complete.
            TypeError: if `rows` is not a tensor.
        """
        self._turns.check_complete("select sequences")
        numbers = _checked_rows(rows, self.batch)
        rows = rows.clone()  # which the caller may change before a layer is used
        for layer in self._layers:
            layer.select(rows)
        self._turns.select(numbers)

    def reorder(self, rows: Tensor) -> None:
        """Put other sequences, or the same, into the places of these, as beam search does.

        Args:
            rows: the number of the sequence that comes into each place, `(B,)`, int32 or int64.

        Raises:
            ValueError: if `rows` has another length than the batch, or as `select` does.
            TypeError: if `rows` is not a tensor.
        """
        if isinstance(rows, Tensor) and self.batch not in (None, rows.numel()):
            raise ValueError(
                f"rows must be a number for each of {self.batch} sequences, got {rows.numel()}; "
                "select takes any"
            )
        self.select(rows)

    def repeat(self, times: int) -> None:
        """Repeat each sequence of the batch; its copies are neighbours.

        Raises:
            ValueError: if there is to be none, or a turn is not complete.
            TypeError: if it is not an integer.
        """
        times = as_count("times", times, 1)
        self.select(torch.arange(self.batch or 0, device="cpu").repeat_interleave(times))

    def reset(self) -> None:
        """Forget all tokens, and give their memory back."""
        self._turns.start(CacheTable.empty(self.table.world_size, self.table.block))
        for layer in self._layers:
            layer.reset()

    def usage(self) -> CacheUsage:
        """Bytes on each rank, of all layers."""
        ranks = range(self.table.world_size)
        sizes = [(layer.bytes_per_column, layer.capacities) for layer in self._layers]
        held = tuple(sum(size * capacity[rank] for size, capacity in sizes) for rank in ranks)
        num_local = self.table.num_local
        used = (
            sum(size * min(capacity[rank], num_local[rank]) for size, capacity in sizes)
            for rank in ranks
        )
        return CacheUsage(held, tuple(used))


def _checked_rows(rows: Tensor, batch: int | None) -> list[int]:
    """The numbers of sequences."""
    if not isinstance(rows, Tensor):
        raise TypeError(f"rows must be a tensor of numbers, got {type(rows).__name__}")
    if rows.ndim != 1 or rows.dtype not in INTEGERS:
        raise ValueError(f"rows must be int32 or int64, (B,), got {rows.dtype} {tuple(rows.shape)}")
    if rows.is_meta:
        raise ValueError("rows must have content, got a tensor on meta; make it on the CPU")
    numbers = rows.tolist()
    wrong = [row for row in numbers if not 0 <= row < (batch or 0)]
    # A cache without tokens has no sequences that could be elsewhere.
    if wrong and batch is not None:
        raise ValueError(f"rows must be from 0 to {batch - 1}, got {wrong[0]}")
    return numbers
