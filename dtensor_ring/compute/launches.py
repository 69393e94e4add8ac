"""The launches of a step: its tiles, joined to one launch of segments where that pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from weakref import WeakKeyDictionary

from dtensor_ring.compute.cuts import cut, num_blocks
from dtensor_ring.compute.hull import hull_of
from dtensor_ring.compute.kernels.launch import Launch
from dtensor_ring.compute.memory import cols_of, rows_of
from dtensor_ring.compute.segments import Segments
from dtensor_ring.planning.masks.mask import Mask
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.tile import CAUSAL, FULL, Tile
from dtensor_ring.planning.values.span import Span, length

FEWEST = 3
"""Fewest tiles for which one launch of segments beats separate ones, whose merges are smaller."""

MAX_OPEN_CHAINS = 16
"""Chains of one mask that a tile may continue."""

Shape = tuple[int, int, int]
"""Batch, local queries and resident keys."""

_Link = tuple[int, Tile]
"""A batch row, and a tile of it."""

_Key = tuple[Shape | None, bool]
"""The shape where there are segments, and whether messages are in flight."""

_MADE: WeakKeyDictionary[Step, dict[_Key, tuple[Launch, ...]]] = WeakKeyDictionary()
"""Launches by step: they live as long as their plan."""


def launches(
    step: Step, shape: Shape, has_segments: bool, in_flight: bool = False
) -> tuple[Launch, ...]:
    """The launches of a step, made once for each shape.

    Tiles of one mask that follow one another in queries and in keys, as those of packed documents
    do, are one launch of segments.

    Args:
        step: whose tiles they cover.
        shape: batch, local queries and resident keys.
        has_segments: whether the kernel takes segments; each tile is a launch if not.
        in_flight: whether messages are in flight meanwhile.
    """
    made = _MADE.get(step)
    if made is None:
        made = _MADE.setdefault(step, {})
    # Single tiles do not depend on the shape, segments count through it.
    key = (shape if has_segments else None), in_flight
    if key not in made:
        found = _joined(step, shape) if has_segments else tuple(map(_single, step.tiles))
        # Two threads may both get here; either result serves.
        made[key] = tuple(replace(x, in_flight=True) for x in found) if in_flight else found
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
        chain = next((x for x in alike[-MAX_OPEN_CHAINS:] if x.takes(tile, batch)), None)
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
    links: list[_Link] = field(default_factory=list)

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
        """Launches of segments, and one of each tile where they are few or one is long."""
        found: list[Launch] = []
        alone: list[_Link] = []
        for first, end in self._cuts(shape):
            links = self.links[first:end]
            if len(_tiles(links, shape[0])) >= FEWEST:
                found.append(self._segments(links, shape))
            else:
                alone += links
        return found + list(map(_single, _tiles(alone, shape[0])))

    def _cuts(self, shape: Shape) -> list[Span]:
        """Ranges of links that are a launch each."""
        blocks = [num_blocks(max(length(tile.rows), length(tile.cols))) for _, tile in self.links]
        gaps = [_gap(*pair, shape) for pair in pairwise(self.links)]
        return cut(blocks, gaps)

    def _segments(self, links: list[_Link], shape: Shape) -> Launch:
        """The tiles, with segments without keys or without queries between them."""
        queries, keys = (
            hull_of([(batch, getattr(tile, side)) for batch, tile in links], shape[0], num_tokens)
            for side, num_tokens in zip(("rows", "cols"), shape[1:], strict=True)
        )
        rows, cols = [0], [0]
        for batch, tile in links:
            # Segments must cover all tokens: a gap becomes a segment that sees nothing.
            _skip(rows, cols, queries.at(batch, tile.rows[0]), keys.at(batch, tile.cols[0]))
            rows.append(queries.at(batch, tile.rows[1]))
            cols.append(keys.at(batch, tile.cols[1]))
        _skip(rows, cols, queries.num_tokens, keys.num_tokens)
        segments = Segments(tuple(rows), tuple(cols))
        return Launch(queries.region, keys.region, self.mask, segments)


def _gap(before: _Link, after: _Link, shape: Shape) -> tuple[int, int]:
    """Segments between two tiles, and blocks of the longest."""
    sides = []
    for size, side in ((shape[1], "rows"), (shape[2], "cols")):
        (batch, last), (next_batch, tile) = before, after
        sides.append((next_batch - batch) * size + getattr(tile, side)[0] - getattr(last, side)[1])
    return sum(map(bool, sides)), num_blocks(max(sides))


def _tiles(links: list[_Link], batch_size: int) -> list[Tile]:
    """Each tile once, where all batch rows share it."""
    counts = Counter(tile for _, tile in links)
    # A tile of every batch row was written out by row for the chain: take that back.
    shared = [(None if counts[x] == batch_size else batch, x) for batch, x in links]
    return list(dict.fromkeys(replace(tile, batch=batch) for batch, tile in shared))


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
