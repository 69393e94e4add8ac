"""Keys and values of sequences that grow, sharded along the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.decode.column_memory import (
    AppendSteps,
    ColumnMemory,
    check_plain,
    column_memory,
    writing,
)
from dtensor_ring.decode.plan import CacheTable
from dtensor_ring.decode.whole import NO_PICKLE, gather_columns, pairs_of, saved, shard_of
from dtensor_ring.dtensor.annotation import axis_group, sequence_layout
from dtensor_ring.dtensor.call_check import as_flag
from dtensor_ring.ops import boundaries
from dtensor_ring.ops.checks import NotPickled
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.ranges import as_count, as_int
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.quantised.block_scales import Format
from dtensor_ring.quantised.kept_tokens import format_named


class CacheLayer:
    """Keys `(B, Nk, C, H)` and values `(B, Nv, C, Hv)` of a layer: C columns of this rank.

    A `ShardedCache` makes its layers. They may differ in heads, head dims, dtypes and devices.

    Attributes:
        number: the index of the layer.
        capacities: the number of columns that fit into the memory of each rank.
    """

    def __init__(self, number: int, appends: AppendSteps, format: Format | None = None) -> None:
        self.number, self._appends, self._format = number, appends, format
        self.reset()

    def reset(self) -> None:
        """Forget all columns, and free their memory."""
        self._memory: tuple[ColumnMemory, ...] = ()
        self._rows: Tensor | None = None  # selected rows that are not copied yet
        self._checked: tuple[Any, ...] = ()  # what was accepted last
        self.capacities: tuple[int, ...] = (0,) * self._appends.table.world_size

    def num_bytes(self, num_cols: int) -> int:
        """Return the bytes of columns in all sequences; 0 before the first append."""
        batch = self._appends.batch or 0  # selected rows count, though copied later
        return sum(x.num_bytes(batch, num_cols) for x in self._memory)

    @property
    def keys(self) -> Tensor:
        """Return the keys of this rank, `(B, Nk, C, H)`: a view, or a dequantised copy.

        Raises:
            ValueError: before the first append.
        """
        return self._columns()[0]

    @property
    def values(self) -> Tensor:
        """Return the values of this rank, `(B, Nv, C, Hv)`: a view, or a dequantised copy.

        Raises:
            ValueError: before the first append.
        """
        return self._columns()[1]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the tokens of the current append step.

        Args:
            key: `(B, Nk, L, H)`: this rank's shard of a sharded append step, otherwise all tokens.
            value: `(B, Nv, L, Hv)`.

        Returns:
            The keys and values of this rank, past and new, `(B, Nk, C, H)` and `(B, Nv, C, Hv)`,
            in the order of positions: views of the cache's memory, or dequantised copies.

        Raises:
            ValueError: if this layer has made the append step already, the tensors do not have the
                length of the append step, their shape, dtype or device differs from the cached
                ones, they need a gradient, or `kv_dtype` cannot round them.
            TypeError: if one of them is not a plain tensor.
        """
        step, given = self._appends.of_layer(self.number), (key, value)
        self._check_once(given, step.num_given)
        if self._rows is not None:
            self._reorder()
        before, capacity = step.cols[0], step.capacities[self._appends.rank]
        with writing():
            # Both before either is kept, so that an error leaves the layer as it was.
            keys, values = self._memory or self._empty(given)
            keys = keys.append(step.kept_of(key), before, capacity)
            values = values.append(step.kept_of(value), before, capacity)
        self._memory = keys, values
        self.capacities, self._appends.batch = step.capacities, key.shape[0]
        self._appends.done(self.number)
        return keys.read(step.cols[1]), values.read(step.cols[1])

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order.

        The layer copies them at its next use. So no lack of memory can make this fail in some
        layers only, and only one layer at a time needs memory for a second copy.
        """
        if self._memory:
            before = self._rows
            self._rows = rows if before is None else before[rows.to(before.device)]

    def shrink(self, capacities: tuple[int, ...]) -> None:
        """Free memory beyond `capacities`, which dropped tokens had allocated."""
        if self._appends.batch is None:  # the dropped append step was the first
            self.reset()
        with writing():
            kept = capacities[self._appends.rank]
            self._memory = tuple([x.shrink(kept) for x in self._memory])
        self.capacities = capacities

    def _reorder(self) -> None:
        """Copy the rows that `select` chose."""
        if self._rows is not None:
            with writing():
                rows = self._rows
                self._memory = tuple([x.select(rows) for x in self._memory])
            self._rows = None

    def _columns(self) -> tuple[Tensor, Tensor]:
        if not self._memory:
            raise ValueError(f"layer {self.number} has no keys and values yet, append brings them")
        self._reorder()
        (keys, values), num_cols = self._memory, self._appends.num_cols(self.number)
        return keys.read(num_cols), values.read(num_cols)

    def _empty(self, like: tuple[Tensor, ...]) -> list[ColumnMemory]:
        """Return memory without columns for such keys and values."""
        each = zip(like, ("keys", "values"), strict=True)
        return [column_memory(x, self._format, kind) for x, kind in each]

    def _check_once(self, given: tuple[Tensor, Tensor], num_tokens: int) -> None:
        """Check tensors, unless the last ones were like them: all tokens of a batch are."""
        key, value = given
        is_plain = type(key) is type(value) is Tensor and not torch.is_grad_enabled()
        if not is_plain or key.is_nested or value.is_nested:  # nested ones have no shape
            return self._check(given, num_tokens)
        shapes, kinds = (key.shape, value.shape), (key.dtype, value.dtype, key.device, value.device)
        seen = num_tokens, self._appends.batch, *shapes, *kinds, key.layout, value.layout
        if seen != self._checked:
            self._check(given, num_tokens)
            self._checked = seen

    def _check(self, given: tuple[Tensor, Tensor], num_tokens: int) -> None:
        """Refuse what is no plain tensor of an append step, or differs from what is cached."""
        check_plain(given, num_tokens)
        rows = len(given[0]), len(given[1])
        batch = rows[0] if self._appends.batch is None else self._appends.batch
        if rows != (batch, batch):
            raise ValueError(
                f"key and value must be of {batch} sequences, got {rows[0]} and {rows[1]}; select "
                "and repeat change their number, reset forgets them"
            )
        cached = [memory.like for memory in self._memory]
        for name, x, known in zip(("key", "value"), given, cached, strict=False):
            here = x.shape[1], x.shape[3], x.dtype, x.device
            if here != (known.shape[1], known.shape[3], known.dtype, known.device):
                raise ValueError(
                    f"layer {self.number} holds {name}s of {_described(known)}, got "
                    f"{_described(x)}; cache.reset() forgets what is there"
                )


def _described(x: Tensor) -> str:
    return f"{x.shape[1]} heads of {x.shape[3]}, {x.dtype} on {x.device}"


MAX_LAYERS = 2**16


class CacheUsage(NamedTuple):
    """The memory of a cache; every rank computes the same numbers.

    Attributes:
        held: allocated bytes, by rank.
        used: bytes among them that hold keys and values, by rank.
    """

    held: tuple[int, ...]
    used: tuple[int, ...]


class ShardedCache:
    """Keys and values of each layer of a model, sharded over the ranks of a mesh axis.

    A cache has a batch of sequences of equal length. Tokens come in *append steps*: `begin` takes
    their number, and then each layer appends its keys and values once. With `dealt=True` an append
    step is sharded: each rank appends its shard, in the order of the layout. Otherwise all ranks
    append the same tokens, and each token's owner keeps it. Every rank computes the owners of all
    tokens, so no message is sent.

    A rank allocates memory for its tokens, and for the rest of the block that it fills. `reset`
    frees all memory; `crop` frees the memory of an append step that it drops whole. After a sharded
    append step the memory is full: the next append step allocates more, and copies the cache layer
    by layer. So a prompt in n chunks is copied (n - 1) / 2 times in total; fewer, larger chunks
    copy less.

    With `kv_dtype`, a layer keeps about half the bytes of bfloat16: every full block of 64 of the
    rank's columns in eight bits, with scales, and the columns after them as they are, until they
    fill a block. So what is kept depends on the tokens, not on how many came at a time, and
    attention is exactly attention to what `append` returns, which is dequantised. That costs each
    step the memory of the layer's columns in full, for the time of its attention, and the time to
    dequantise them: no kernel reads eight bits yet. A layer then takes what its columns need, and
    `crop` frees the rest; a crop into a full block opens it again, with the numbers that it was
    rounded to. docs/numerics.md has the errors.

    Args:
        mesh: the 1-D mesh of the axis.
        num_layers: the number of layers that keep keys and values.
        layout: the layout of each sharded append step by itself. Its runs must be neighbouring
            tokens, as in "zigzag" or "block_cyclic:256". By default the axis's layout, or zigzag.
        block: how many tokens of unsharded append steps one rank keeps before the rank with the
            fewest tokens is next; memory grows in steps of this size. After a prompt in
            the layout `"whole_blocks"` of as many tokens, each block of the sequence stays on one
            rank, which a fixed order of sums needs.
        kv_dtype: `"int8"` or `"fp8"` (e4m3), the eight bits of full blocks, the same on all ranks;
            by default nothing is rounded.

    Raises:
        ValueError: if the mesh is not 1-D, a number is out of range, or the layout or `kv_dtype` is
            unknown.
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
        kv_dtype: str | None = None,
    ) -> None:
        self._not_pickled = NotPickled(NO_PICKLE)  # first: pickle reads attributes in order
        group, format = axis_group(mesh), format_named(kv_dtype)
        num_layers = as_count("num_layers", num_layers, 1, MAX_LAYERS)
        self.mesh, self.kv_dtype = mesh, kv_dtype
        self.layout = as_layout(sequence_layout(mesh) or "zigzag" if layout is None else layout)
        table = CacheTable.empty(group.size(), block)
        self._appends = AppendSteps(table, group.rank(), num_layers, kv_dtype)
        layers = range(num_layers)
        self._layers = tuple([CacheLayer(x, self._appends, format) for x in layers])
        self._key_runs: tuple[CacheTable, int, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[CacheLayer]:
        return iter(self._layers)

    def __getitem__(self, number: int) -> CacheLayer:
        """Return the layer with that number.

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
        """Return the positions that each rank holds, including those of the current append step."""
        return self._appends.table

    @property
    def seq_len(self) -> int:
        """Return the length of each sequence, including the tokens of the current append step."""
        return self.table.seq_len

    @property
    def batch(self) -> int | None:
        """Return the number of sequences, or `None` before the first append."""
        return self._appends.batch

    @property
    def key_runs(self) -> Tensor:
        """Return start and length of the runs of positions by rank, `(W, R, 2)`, int32, on the CPU.

        Runs ascend, and runs of length 0 pad each row. The start of the last run of the first row
        may be a checksum of `kv_dtype` and all calls of `select`, `reorder` and `repeat`: attention
        compares it, and raises if ranks differ. The tensor is the same object until the next
        append step, crop or selection, so cached plans are found again.
        """
        table, order = self._appends.table, self._appends.order
        if self._key_runs is None or self._key_runs[0] is not table or self._key_runs[1] != order:
            runs = torch.from_numpy(table.marked(order).copy())
            boundaries.know_runs(runs, table.run_table(order))
            self._key_runs = table, order, runs
        return self._key_runs[2]

    @property
    def query_runs(self) -> Tensor:
        """Return the runs of the tokens of the last append step, in the format of `key_runs`.

        Raises:
            ValueError: if the last append step was not sharded, or a crop followed it.
        """
        last = self._appends.last
        if last is None or not last.is_sharded:
            raise ValueError(
                "only the tokens of a sharded append step have runs: cache.begin(num_tokens, "
                "dealt=True)"
            )
        return torch.tensor(self.table.numbers_from(last.begin), device="cpu")

    @property
    def positions(self) -> Tensor:
        """Return the position of each column of this rank, `(C,)`, int64, on the CPU."""
        return torch.from_numpy(self.table.positions(self._appends.rank))

    def begin(self, num_tokens: int, *, dealt: bool) -> None:
        """Begin an append step: each layer appends its tokens next.

        Args:
            num_tokens: the number of new tokens of each sequence, over all ranks.
            dealt: whether the layout shards them over the ranks; otherwise all ranks have all.

        Raises:
            ValueError: if a layer has not appended the previous append step, `num_tokens` is below
                1, or the layout cannot shard them.
            TypeError: if `num_tokens` is not an integer.
        """
        self._appends.begin(num_tokens, self.layout if as_flag("dealt", dealt) else None)

    def crop(self, seq_len: int) -> None:
        """Keep the first `seq_len` tokens of each sequence.

        Memory stays for later tokens, unless `kv_dtype` is given. A full block that the crop cuts
        then holds what its tokens were rounded to.

        A crop to the start of the last append step undoes the append step, also if some layers
        failed to append it. It frees the memory of the append step. If it was the first append
        step, the batch size is unset.

        Raises:
            ValueError: if `seq_len` is negative, larger than the length, or within an append step
                that some layers have not appended.
            TypeError: if `seq_len` is not an integer.
        """
        capacities = self._appends.crop(seq_len)
        if capacities is not None:
            for layer in self._layers:
                layer.shrink(capacities)

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order.

        Each layer copies its rows at its next use, so only one layer at a time needs memory for a
        second copy.

        Args:
            rows: numbers of sequences, `(B',)`, int32 or int64; repeats are allowed.

        Raises:
            ValueError: if a number is out of range, or an append step is not complete.
            TypeError: if `rows` is not a tensor.
        """
        self._appends.check_complete("select sequences")
        numbers = _checked_rows(rows, self.batch)
        rows = rows.clone()  # the caller may change `rows` before a layer uses them
        for layer in self._layers:
            layer.select(rows)
        self._appends.select(numbers)

    def reorder(self, rows: Tensor) -> None:
        """Replace each sequence by the one with the given number, as beam search does.

        Args:
            rows: the number of the sequence that moves to each place, `(B,)`, int32 or int64.

        Raises:
            ValueError: if the length of `rows` is not the batch size, or as `select` does.
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
            ValueError: if `times` is below 1, or an append step is not complete.
            TypeError: if `times` is not an integer.
        """
        times = as_count("times", times, 1)
        self.select(torch.arange(self.batch or 0, device="cpu").repeat_interleave(times))

    def reset(self) -> None:
        """Forget all tokens, and free their memory."""
        self._appends.start(CacheTable.empty(self.table.world_size, self.table.block))
        for layer in self._layers:
            layer.reset()

    def whole(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer on all ranks: `(B, Nk, S, H)`, `(B, Nv, S, Hv)`.

        Tokens are in the order of positions. All ranks must call it.

        Raises:
            ValueError: before the first append, or if an append step is not complete.
        """
        layer = self[number]
        self._appends.check_complete("read the whole cache")
        keys, values = (gather_columns(x, self.table, self.mesh) for x in layer._columns())
        return keys, values

    def state_dict(self) -> dict[str, Any]:
        """Return all tokens on every rank, on the CPU, for `torch.save` or checkpoints.

        All ranks must call it. Eight bits are dequantised.

        Returns:
            `seq_len`, and by layer `layers.0.keys` and `layers.0.values` as `whole` returns them.
        """
        layers = range(len(self) if self.seq_len else 0)
        return saved(self.seq_len, map(self.whole, layers))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all tokens by those of a state that any number of ranks has saved.

        Each rank keeps its tokens of the layout, as after one sharded append step. With `kv_dtype`,
        full blocks are rounded (again).

        Raises:
            ValueError: on every rank, if their states differ, or have other layers; nothing changes
                then.
        """
        pairs = pairs_of(state, len(self), self.mesh)
        self.reset()
        if not pairs:
            return
        length = self.layout.dealt_length(state["seq_len"], self.mesh.size())
        self.begin(length, dealt=True)
        for layer, pair in zip(self, pairs, strict=True):
            layer.append(*shard_of(pair, self.layout, self.mesh, length))
        self.crop(state["seq_len"])

    def usage(self) -> CacheUsage:
        """Return the bytes of all layers on each rank."""
        ranks = range(self.table.world_size)
        num_local, layers = self.table.num_local, self._layers
        held = (sum(x.num_bytes(x.capacities[rank]) for x in layers) for rank in ranks)
        used = (
            sum(x.num_bytes(min(x.capacities[rank], num_local[rank])) for x in layers)
            for rank in ranks
        )
        return CacheUsage(tuple(held), tuple(used))


def _checked_rows(rows: Tensor, batch: int | None) -> list[int]:
    """Check numbers of sequences, and return them as a list."""
    if not isinstance(rows, Tensor):
        raise TypeError(f"rows must be a tensor of numbers, got {type(rows).__name__}")
    if rows.ndim != 1 or rows.dtype not in boundaries.INTEGERS:
        raise ValueError(f"rows must be int32 or int64, (B,), got {rows.dtype} {tuple(rows.shape)}")
    if rows.is_meta:
        raise ValueError("rows must have content, got a tensor on meta; make it on the CPU")
    numbers = rows.tolist()
    wrong = [row for row in numbers if not 0 <= row < (batch or 0)]
    # A cache without tokens has no sequences yet, so it accepts any numbers.
    if wrong and batch is not None:
        raise ValueError(f"rows must be from 0 to {batch - 1}, got {wrong[0]}")
    return numbers
