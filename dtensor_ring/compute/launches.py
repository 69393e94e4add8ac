"""The launches of a step: its tiles, joined to one launch of segments where that pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from dtensor_ring.compute.kernels.launch import Launch
from dtensor_ring.compute.memory import cols_of, region, rows_of
from dtensor_ring.compute.segments import Segments
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.span import length
from dtensor_ring.planning.tile import CAUSAL, FULL, Tile

FEWEST = 3
"""Fewest tiles for which one launch of segments beats separate ones, whose merges are smaller."""

MOST = 16
"""Chains of one mask that a tile may continue."""

Shape = tuple[int, int, int]
"""Batch, local queries and resident keys."""

_MADE: WeakKeyDictionary[Step, dict[Shape | None, tuple[Launch, ...]]] = WeakKeyDictionary()
"""Launches by step, and by shape where they have segments: they live as long as their plan."""


def launches(step: Step, shape: Shape, has_segments: bool) -> tuple[Launch, ...]:
    """The launches of a step, made once for each shape.

    Tiles of one mask that follow one another in queries and in keys, as those of packed documents
    do, are one launch of segments.

    Args:
        step: whose tiles they cover.
        shape: batch, local queries and resident keys.
        has_segments: whether the kernel takes segments; each tile is a launch if not.
    """
    made = _MADE.get(step)
    if made is None:
        made = _MADE.setdefault(step, {})
    # Single tiles do not depend on the shape, segments count through it.
    key = shape if has_segments else None
    if key not in made:
        # Two threads may both get here; either result serves.
        made[key] = _joined(step, shape) if has_segments else tuple(map(_single, step.tiles))
    return made[key]


def _single(tile: Tile) -> Launch:
    return Launch(rows_of(tile), cols_of(tile), tile.mask)


def _joined(step: Step, shape: Shape) -> tuple[Launch, ...]:
    """Chains of tiles that are long enough become one launch each."""
    chains: list[_Chain] = []
    by_mask: dict[Mask, list[_Chain]] = {}
    for tile, batch in _by_batch(step.tiles, shape[0]):
        # The last ones only: rows that see many ranges of keys would make many chains to look at.
        alike = by_mask.setdefault(tile.mask, [])
        chain = next((x for x in alike[-MOST:] if x.takes(tile, batch)), None)
        if chain is None:
            chain = _Chain(tile.mask)
            chains.append(chain)
            alike.append(chain)
        chain.links.append((batch, tile))
    return tuple(launch for chain in chains for launch in chain.launches(shape))


@dataclass
class _Chain:
    """Tiles of one mask, by batch row, each after the one before."""

    mask: Mask
    links: list[tuple[int, Tile]] = field(default_factory=list)

    def takes(self, tile: Tile, batch: int) -> bool:
        """Whether the tile, which has the same mask, may be the next."""
        last_batch, last = self.links[-1]
        # Bottom-right kernels shift a band by rows - cols, which is one number for all segments.
        are_square = all(length(x.rows) == length(x.cols) for x in (last, tile))
        if not (are_square or self.mask in (FULL, CAUSAL)):
            return False
        is_after = tile.rows[0] >= last.rows[1] and tile.cols[0] >= last.cols[1]
        return batch > last_batch or (batch == last_batch and is_after)

    def launches(self, shape: Shape) -> list[Launch]:
        """One launch of segments, or one of each tile where they are few."""
        tiles = self._tiles(shape[0])
        return [self._segments(*shape)] if len(tiles) >= FEWEST else list(map(_single, tiles))

    def _tiles(self, batch_size: int) -> list[Tile]:
        """Each tile once, where all batch rows share it."""
        counts = Counter(tile for _, tile in self.links)
        # A tile of every batch row was written out by row for the chain: take that back.
        links = [(None if counts[x] == batch_size else batch, x) for batch, x in self.links]
        return list(dict.fromkeys(replace(tile, batch=batch) for batch, tile in links))

    def _segments(self, batch_size: int, num_rows: int, num_cols: int) -> Launch:
        """All tiles, with segments without keys or without queries between them."""
        rows, cols = [0], [0]
        for batch, tile in self.links:
            # Segments must cover all tokens: a gap becomes a segment that sees nothing.
            _skip(rows, cols, batch * num_rows + tile.rows[0], batch * num_cols + tile.cols[0])
            rows.append(batch * num_rows + tile.rows[1])
            cols.append(batch * num_cols + tile.cols[1])
        _skip(rows, cols, batch_size * num_rows, batch_size * num_cols)
        segments = Segments(tuple(rows), tuple(cols))
        return Launch(region(None, (0, num_rows)), region(None, (0, num_cols)), self.mask, segments)


def _skip(rows: list[int], cols: list[int], row: int, col: int) -> None:
    """Append a segment without keys up to that row, and one without queries up to that column."""
    for ends, end, others in ((rows, row, cols), (cols, col, rows)):
        if ends[-1] < end:
            ends.append(end)
            others.append(others[-1])  # the other side has no token in this segment


def _by_batch(tiles: tuple[Tile, ...], batch_size: int) -> Iterator[tuple[Tile, int]]:
    """The tiles of each batch row, in its order."""
    for batch in range(batch_size):
        yield from ((tile, batch) for tile in tiles if tile.batch in (None, batch))
