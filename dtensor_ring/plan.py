"""What each rank computes at each step of the ring, and what has to travel for it.

Everything here is integer arithmetic on positions. The ring above holds no mask logic and names
no layout: it runs the tiles it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from dtensor_ring.layout import Layout, Run
from dtensor_ring.mask import Mask
from dtensor_ring.tile import Span, Tile, moved, seen_cols, shard_tiles

Documents = tuple[tuple[int, ...], ...]
"""Boundaries of documents in global positions: one row for the whole batch, or one for each row."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the shard of a source travels: the columns that other ranks see, and the hops."""

    cols: Span = (0, 0)
    num_hops: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of the ring: `tiles` against the columns `cols` of the source's shard.

    The columns of the tiles count from the first held column.
    """

    source: int
    cols: Span
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does: its steps, the same number on every rank, and every source's reach."""

    rank: int
    world_size: int
    steps: tuple[Step, ...]
    reaches: tuple[Reach, ...]

    @property
    def num_steps(self) -> int:
        """Steps of the ring, one more than the hops of the shard that travels furthest."""
        return len(self.steps)

    def arrives(self, source: int, hop: int) -> bool:
        """Whether the shard of `source` makes hop number `hop` (the first is 1)."""
        return 1 <= hop <= self.reaches[source].num_hops


@lru_cache(maxsize=1024)
def plan(
    layout: Layout,
    mask: Mask,
    rank: int,
    world_size: int,
    seq_len: int,
    documents: Documents | None = None,
) -> Plan:
    """Plan of one rank.

    Args:
        layout: how the tokens are dealt.
        mask: the band of lags, in tokens.
        rank: this rank's index on the ring.
        world_size: ranks on the ring.
        seq_len: global length, in tokens.
        documents: boundaries; a query sees keys of its own document only, and tokens behind the
            last boundary see nothing.

    Raises:
        ValueError: if the layout cannot deal the length, or the documents are not boundaries.
    """
    _check(world_size, seq_len, documents)
    shards = tuple(layout.runs(other, world_size, seq_len) for other in range(world_size))
    reaches = _reaches(shards, mask, documents)
    steps = []
    for step in range(1 + max(reach.num_hops for reach in reaches)):
        source = (rank - step) % world_size
        num_cols = sum(run.length for run in shards[source])
        cols = (0, num_cols) if step == 0 else reaches[source].cols
        tiles = tuple(
            replace(tile, cols=moved(tile.cols, -cols[0]))
            for batch, bounds in _rows(documents)
            for tile in shard_tiles(shards[rank], shards[source], mask, bounds, batch)
        )
        steps.append(Step(source, cols, tiles))
    return Plan(rank, world_size, tuple(steps), reaches)


@lru_cache(maxsize=64)
def _reaches(
    shards: tuple[tuple[Run, ...], ...], mask: Mask, documents: Documents | None
) -> tuple[Reach, ...]:
    """How far each source's shard has to travel: nothing moves that nobody sees."""
    world_size = len(shards)
    reaches = []
    for source in range(world_size):
        reach = Reach()
        for hop in range(1, world_size):
            query = shards[(source + hop) % world_size]
            for _, bounds in _rows(documents):
                cols = seen_cols(query, shards[source], mask, bounds)
                if cols and reach.num_hops:
                    cols = min(cols[0], reach.cols[0]), max(cols[1], reach.cols[1])
                if cols:
                    reach = Reach(cols, hop)
        reaches.append(reach)
    return tuple(reaches)


def _rows(documents: Documents | None) -> list[tuple[int | None, tuple[int, ...] | None]]:
    """Batch row, `None` for all of them, and the boundaries in it."""
    if documents is None or len(documents) == 1:
        return [(None, documents[0] if documents else None)]
    return list(enumerate(documents))


def _check(world_size: int, seq_len: int, documents: Documents | None) -> None:
    if world_size < 1 or seq_len < 0:
        raise ValueError(f"cannot plan {seq_len} tokens on {world_size} ranks")
    for bounds in documents or ():
        steps_back = any(end < begin for begin, end in pairwise(bounds))
        if not bounds or bounds[0] != 0 or bounds[-1] > seq_len or steps_back:
            raise ValueError(
                "cu_seqlens must start at 0, never decrease and end at or before the sequence "
                f"length {seq_len}, got {list(bounds)}"
            )
