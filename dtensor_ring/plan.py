"""What each rank computes at each step of the ring, and what has to travel for it.

Everything here is integer arithmetic on positions. The ring above holds no mask logic and names
no layout: it runs the tiles it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, groupby, pairwise
from operator import index
from typing import Any

from dtensor_ring.layout import Layout, Run
from dtensor_ring.mask import Mask
from dtensor_ring.route import Mail, Route, route
from dtensor_ring.tile import (
    NOTHING,
    Bounds,
    Span,
    Tile,
    hull,
    length,
    moved,
    seen_cols,
    shard_tiles,
)

Documents = tuple[tuple[int, ...], ...]
"""Boundaries of documents in global positions: one row for the whole batch, or one for each row."""

Rows = tuple[tuple[int | None, Bounds], ...]


@dataclass(frozen=True, slots=True, eq=False)  # hashed by identity: it may hold many tiles
class Step:
    """One iteration of the ring: `tiles` against the columns `cols` of the source's shard.

    The columns of the tiles count from the first held column.
    """

    source: int
    cols: Span
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does: its steps, the same number on every rank, and its messages.

    `shards` has, by hop, the mail of keys and values, which come for the step of that number;
    `sums` has, by step, that of the gradients' sums, which go when the step has added to them.
    There is none for the first step, and none behind the last.
    """

    rank: int
    steps: tuple[Step, ...]
    shards: tuple[Mail, ...]
    sums: tuple[Mail, ...]

    @property
    def num_steps(self) -> int:
        """Steps of the ring, the one without messages included."""
        return len(self.steps)

    @property
    def num_received(self) -> int:
        """Tokens whose keys and values come to this rank, over all hops."""
        return sum(length(parcel.cols) for mail in self.shards for parcel in mail.receives)


@lru_cache(maxsize=64)  # masks of the layers, by batches in flight; plans of documents are large
def plan(
    layout: Layout,
    mask: Mask,
    rank: int,
    world_size: int,
    seq_len: int,
    documents: Documents | None = None,
    key_seq_len: int | None = None,
    key_documents: Documents | None = None,
) -> Plan:
    """Plan of one rank.

    Args:
        layout: how the tokens are dealt.
        mask: what a query sees.
        rank: this rank's index on the ring.
        world_size: ranks on the ring.
        seq_len: global length, in tokens.
        documents: boundaries; a query sees keys of its own document only, and tokens behind the
            last boundary see nothing.
        key_seq_len: global length of keys and values, for cross attention.
        key_documents: their boundaries: document number d of the queries sees number d of these.

    Raises:
        ValueError: if the layout cannot deal the length, the documents are not boundaries, or
            cross attention has a mask that is not full.
    """
    key_seq_len = seq_len if key_seq_len is None else key_seq_len
    check_documents(world_size, seq_len, documents)
    check_documents(world_size, key_seq_len, key_documents, "key_cu_seqlens")
    if seq_len != key_seq_len or key_documents is not None:
        _check_cross(mask, (seq_len, key_seq_len), documents, key_documents)
    rows = _rows(mask, (seq_len, key_seq_len), documents, key_documents or documents)
    queries, keys = (
        tuple(layout.runs(other, world_size, num_tokens) for other in range(world_size))
        for num_tokens in (seq_len, key_seq_len)
    )
    way = _route(queries, keys, mask, rows)
    steps = []
    for distance in way.distances:
        source = (rank - distance) % world_size
        whole = 0, sum(run.length for run in keys[source])
        cols = way.held(source, distance) if distance else whole
        tiles = tuple(
            replace(tile, cols=moved(tile.cols, -cols[0]))
            for batch, bounds in rows
            for tile in shard_tiles(queries[rank], keys[source], mask, bounds, batch)
        )
        steps.append(Step(source, cols, tiles))
    hops = range(1, len(steps))
    shards, sums = (
        (Mail(), *(mail(rank, hop) for hop in hops), Mail()) for mail in (way.shards, way.sums)
    )
    return Plan(rank, tuple(steps), shards, sums)


def visible_pairs(
    mask: Mask,
    seq_len: int,
    documents: Documents | None,
    run: Run,
    key_seq_len: int | None = None,
    key_documents: Documents | None = None,
) -> int:
    """Pairs that the queries of a run see, summed over the rows of the documents."""
    key_seq_len = seq_len if key_seq_len is None else key_seq_len
    everything = (Run(0, key_seq_len),) if key_seq_len else ()
    rows = _rows(mask, (seq_len, key_seq_len), documents, key_documents or documents)
    return sum(
        tile.area for _, bounds in rows for tile in shard_tiles((run,), everything, mask, bounds)
    )


def as_documents(cu_seqlens: Any) -> Documents | None:
    """Boundaries `(D+1,)` or `(B, D+1)`, a tensor or a sequence, as the planner wants them.

    Empty documents are left out.
    """
    if cu_seqlens is None:
        return None
    rows: Any = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens
    if not isinstance(rows, Sequence):
        raise ValueError(f"boundaries of documents must be (D+1,) or (B, D+1), got {cu_seqlens!r}")
    nested = bool(rows) and isinstance(rows[0], Sequence)
    return tuple(
        tuple(end for end, _ in groupby(map(index, row))) for row in (rows if nested else [rows])
    )


@lru_cache(maxsize=64)
def _route(
    queries: tuple[tuple[Run, ...], ...], keys: tuple[tuple[Run, ...], ...], mask: Mask, rows: Rows
) -> Route:
    """How shards travel: nothing moves that nobody sees."""
    world_size = len(keys)
    needs = []
    for source in range(world_size):
        seen = [NOTHING]
        for distance in range(1, world_size):
            query = queries[(source + distance) % world_size]
            seen.append(hull(seen_cols(query, keys[source], mask, bounds) for _, bounds in rows))
        needs.append(tuple(seen))
    return route(tuple(needs))


@lru_cache(maxsize=64)
def _rows(
    mask: Mask,
    seq_lens: tuple[int, int],
    documents: Documents | None,
    key_documents: Documents | None,
) -> Rows:
    """Batch row, `None` for all of them, and the bounds in it, those of the mask's chunks too."""
    sides = [
        tuple(_cut(row, mask.chunk) for row in given or ((0, seq_len),))
        for seq_len, given in zip(seq_lens, (documents, key_documents), strict=True)
    ]
    if max(map(len, sides)) == 1:
        return ((None, (sides[0][0], sides[1][0])),)
    bounds = zip(*(cycle(side) if len(side) == 1 else side for side in sides), strict=False)
    return tuple(enumerate(bounds))


def _cut(row: tuple[int, ...], chunk: int | None) -> tuple[int, ...]:
    """Boundaries of documents, and of the chunks within them."""
    return row if chunk is None else tuple(sorted({*row, *range(0, row[-1], chunk)}))


def check_documents(
    world_size: int, seq_len: int, documents: Documents | None, name: str = "cu_seqlens"
) -> None:
    """Refuse boundaries that are none, calling them by that name; and a ring of no ranks."""
    if world_size < 1 or seq_len < 0:
        raise ValueError(f"cannot plan {seq_len} tokens on {world_size} ranks")
    for bounds in documents or ():
        steps_back = any(end < begin for begin, end in pairwise(bounds))
        if not bounds or bounds[0] != 0 or bounds[-1] > seq_len or steps_back:
            raise ValueError(
                f"{name} must start at 0, never decrease and end at or before the sequence "
                f"length {seq_len}, got {list(bounds)}"
            )


def _check_cross(
    mask: Mask,
    seq_lens: tuple[int, int],
    documents: Documents | None,
    key_documents: Documents | None,
) -> None:
    """Queries and keys of different sequences have no common positions."""
    if mask != Mask.full():
        raise ValueError(
            f"{seq_lens[0]} query and {seq_lens[1]} key tokens, or documents of their own, are "
            f"cross attention, which has no diagonal: it takes Mask.full() only, got {mask}"
        )
    if () in (documents, key_documents):
        return  # an empty batch has no boundaries to count
    counts = [None if rows is None else len(rows[0]) for rows in (documents, key_documents)]
    if counts[0] != counts[1]:
        raise ValueError(
            "cross attention of documents needs as many boundaries in cu_seqlens as in "
            f"key_cu_seqlens, got {counts[0] or 'none'} and {counts[1] or 'none'}"
        )
