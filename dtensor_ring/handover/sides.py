"""What ranks tell each other before a cache is transferred, and what all plan from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dtensor_ring.decode.cache import CacheLayer, ShardedCache
from dtensor_ring.decode.plan import CacheTable
from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.handover.columns import ColumnMove, KeptColumns
from dtensor_ring.handover.plan import Side, column_moves
from dtensor_ring.planning.run_table import as_layout

Pair = tuple[Tensor, Tensor]


class Kept(NamedTuple):
    """What a cache holds, the same on all ranks that give it.

    Attributes:
        ranks: the global ranks of its axis.
        table: which positions each of them has.
        layers: the keys and values of each layer.
        batch: the number of sequences.
        order: the checksum of format and selections, see `AppendSteps`.
        kv_dtype: the format of full blocks.
    """

    ranks: tuple[int, ...]
    table: CacheTable
    layers: tuple[tuple[KeptColumns, KeptColumns], ...]
    batch: int
    order: int
    kv_dtype: str | None

    @classmethod
    def of(cls, cache: ShardedCache, like: Pair | None, seq_len: int | None) -> Kept:
        """Return those of a cache, of its first `seq_len` tokens.

        Raises:
            ValueError: if it has fewer tokens, or a layer has none yet and there is no `like`.
        """
        table = cache.table if seq_len is None else cache.table.crop(seq_len)
        layers = tuple(_of_layer(layer, like, cache.batch) for layer in cache)
        ranks = tuple(dist.get_process_group_ranks(axis_group(cache.mesh)))
        batch = layers[0][0].shape[0]
        return cls(ranks, table, layers, batch, cache._appends.order, cache.kv_dtype)


def _of_layer(
    layer: CacheLayer, like: Pair | None, batch: int | None
) -> tuple[KeptColumns, KeptColumns]:
    if layer._memory:
        keys, values = (x.like for x in layer._memory)
    elif like is not None:
        keys, values = like
    else:
        raise ValueError(
            f"layer {layer.number} of the source has no keys and values yet; append them, or tell "
            "by like=(keys, values) what it will append"
        )
    rows = len(keys) if batch is None else batch
    return KeptColumns.of(keys, rows), KeptColumns.of(values, rows)


class Wanted(NamedTuple):
    """What a cache is to become, the same on all ranks that get it.

    Attributes:
        ranks: the global ranks of its axis; those of this rank's shard of heads.
        layout, block: how its columns are sharded.
        num_layers: the number of its layers.
        kv_dtype: the format of full blocks.
        num_shards: how many shards the heads have.
        seq_len: the tokens that it has, which must be 0.
    """

    ranks: tuple[int, ...]
    layout: str
    block: int
    num_layers: int
    kv_dtype: str | None
    num_shards: int
    seq_len: int

    @classmethod
    def of(cls, cache: ShardedCache, heads: dist.DeviceMesh | None) -> Wanted:
        """Return those of a cache whose heads are sharded over a mesh."""
        ranks = tuple(dist.get_process_group_ranks(axis_group(cache.mesh)))
        size = 1 if heads is None else axis_group(heads).size()
        return cls(
            ranks,
            cache.layout.spec,
            cache.table.block,
            len(cache),
            cache.kv_dtype,
            size,
            cache.seq_len,
        )

    def table(self, size: int, seq_len: int) -> CacheTable:
        """Return which positions each of `size` ranks gets."""
        layout = as_layout(self.layout)
        # A layout may need a padded length. Columns beyond the sequence are cropped again.
        dealt = CacheTable.empty(size, self.block).append_sharded(
            layout, layout.dealt_length(seq_len, size)
        )
        return dealt.crop(seq_len)


class Told(NamedTuple):
    """What one rank tells: the cache that it gives, the one that it gets, its shard of heads."""

    kept: Kept | None
    wanted: Wanted | None
    heads: int = 0


class HandOverPlan(NamedTuple):
    """What all ranks plan alike.

    Attributes:
        kept: the cache.
        table: which positions each rank of the target gets.
        num_shards: how many shards the heads of the target have.
        moves: all moves.
    """

    kept: Kept
    table: CacheTable
    num_shards: int
    moves: tuple[ColumnMove, ...]


def planned(told: Sequence[Told], ranks: Sequence[int]) -> HandOverPlan:
    """Return the plan of what ranks told.

    Args:
        told: by rank of the group.
        ranks: the global rank of each.

    Raises:
        ValueError: on every rank alike, if caches do not fit each other, or a rank is missing.
    """
    kept = _same("source", [x.kept for x in told])
    # Each shard of the heads has its own axis, so the calls of these ranks may differ.
    wanted = _same("target", [x.wanted._replace(ranks=()) for x in told if x.wanted])
    if wanted.seq_len:
        raise ValueError(f"the target must be empty, it has {wanted.seq_len} tokens; reset it")
    formats = ("kv_dtype", kept.kv_dtype, wanted.kv_dtype)
    for name, here, there in (("layers", len(kept.layers), wanted.num_layers), formats):
        if here != there:
            raise ValueError(
                f"both caches must have the same {name}, the source has {here} and the target "
                f"{there}"
            )
    # Ranks of a source have all heads; those of a target may have a shard of them.
    sources = {(ranks[i], 0): i for i, x in enumerate(told) if x.kept}
    targets = {(ranks[i], x.heads): i for i, x in enumerate(told) if x.wanted}
    axes = {x.heads: x.wanted.ranks for x in told if x.wanted}
    before = Side(kept.table.numbers, _ranks_of("source", {0: kept.ranks}, 1, sources))
    by_shard = _ranks_of("target", axes, wanted.num_shards, targets)
    table = wanted.table(len(by_shard), kept.table.seq_len)
    moves = column_moves(before, Side(table.numbers, by_shard))
    num_cols = _num_cols(before.ranks, kept.table), _num_cols(by_shard, table)
    split = [
        ColumnMove.of(x, (num_cols[0][x.source], num_cols[1][x.target]), kept.kv_dtype)
        for x in moves
    ]
    return HandOverPlan(kept, table, wanted.num_shards, tuple(split))


def _num_cols(ranks: Sequence[Sequence[int]], table: CacheTable) -> dict[int, int]:
    """Return the number of columns of each rank."""
    return {rank: n for row, n in zip(ranks, table.num_local, strict=True) for rank in row}


def _same(name: str, given: Sequence[Any]) -> Any:
    """Return the value on which all ranks of a side agree.

    Raises:
        ValueError: if some told something else, or nobody told anything.
    """
    there = [x for x in given if x is not None]
    if not there:
        raise ValueError(f"no rank has a {name}: some must give a cache, and some get one")
    if any(x != there[0] for x in there):
        other = next(x for x in there if x != there[0])
        raise ValueError(
            f"all ranks of the {name} must have the same cache, they have {_written(there[0])} and "
            f"{_written(other)}"
        )
    return there[0]


def _written(told: Kept | Wanted) -> str:
    fields = told._asdict() | ({"table": told.table.runs} if isinstance(told, Kept) else {})
    return ", ".join(f"{name} {x}" for name, x in fields.items())


def _ranks_of(
    name: str, axes: dict[int, tuple[int, ...]], num_shards: int, found: dict[tuple[int, int], int]
) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank of an axis, the ranks of the group that have its columns, by shard.

    Raises:
        ValueError: if one of them is not in the group, or gave no cache.
    """
    missing = [x for x in range(num_shards) if x not in axes]
    missing += [rank for shard, axis in axes.items() for rank in axis if (rank, shard) not in found]
    if missing:
        raise ValueError(
            f"mesh must have all ranks of the {name}, and each of them its cache; missing are "
            f"{missing}"
        )
    size = len(axes[0])
    return tuple(
        tuple(found[axes[shard][i], shard] for shard in range(num_shards)) for i in range(size)
    )
