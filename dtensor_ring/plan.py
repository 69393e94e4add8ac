"""What each rank computes at each step of the ring, and what has to travel for it.

Everything here is integer arithmetic on positions. The ring above holds no mask logic and names
no layout: it runs the tiles it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from dtensor_ring.layout import Layout
from dtensor_ring.mask import Mask
from dtensor_ring.tile import Span, Tile, moved, shard_tiles

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


TileGrid = tuple[tuple[tuple[Tile, ...], ...], ...]
"""Tiles by rank, then by source, in indices of the shards."""


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
    grid = tile_grid(layout, mask, world_size, seq_len, documents)
    reaches = _reaches(grid)
    steps = []
    for step in range(1 + max(reach.num_hops for reach in reaches)):
        source = (rank - step) % world_size
        tiles = grid[rank][source]
        cols = reaches[source].cols
        if step == 0:
            cols = (0, sum(run.length for run in layout.runs(rank, world_size, seq_len)))
        held = tuple(replace(tile, cols=moved(tile.cols, -cols[0])) for tile in tiles)
        steps.append(Step(source, cols, held))
    return Plan(rank, world_size, tuple(steps), reaches)


@lru_cache(maxsize=64)
def tile_grid(
    layout: Layout, mask: Mask, world_size: int, seq_len: int, documents: Documents | None = None
) -> TileGrid:
    """The tiles of every rank against every source: the whole schedule of a ring."""
    _check(world_size, seq_len, documents)
    runs = [layout.runs(rank, world_size, seq_len) for rank in range(world_size)]
    rows = documents or (None,)
    return tuple(
        tuple(
            tuple(
                tile
                for index, bounds in enumerate(rows)
                for tile in shard_tiles(
                    query, key, mask, bounds, batch=index if len(rows) > 1 else None
                )
            )
            for key in runs
        )
        for query in runs
    )


def _reaches(grid: TileGrid) -> tuple[Reach, ...]:
    """How far each source's shard has to travel: nothing moves that nobody sees."""
    world_size = len(grid)
    reaches = []
    for source in range(world_size):
        seen = {
            hop: grid[(source + hop) % world_size][source]
            for hop in range(1, world_size)
            if grid[(source + hop) % world_size][source]
        }
        cols = [tile.cols for tiles in seen.values() for tile in tiles]
        if cols:
            hull = min(start for start, _ in cols), max(end for _, end in cols)
            reaches.append(Reach(hull, max(seen)))
        else:
            reaches.append(Reach())
    return tuple(reaches)


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
