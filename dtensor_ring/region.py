"""What a tile is of a tensor: an index of batch, heads and tokens."""

from __future__ import annotations

from dtensor_ring.tile import Span, Tile

Region = tuple[slice, slice, slice]
"""An index of batch, heads and tokens."""
WHOLE: Region = (slice(None), slice(None), slice(None))


def rows_of(tile: Tile) -> Region:
    """Index of a tile's queries in `(B, N, L)`."""
    return region(tile.batch, tile.rows)


def cols_of(tile: Tile) -> Region:
    """Index of a tile's keys in `(B, N, C)`."""
    return region(tile.batch, tile.cols)


def region(batch: int | None, tokens: Span) -> Region:
    """Index of these tokens in one batch row, or in all of them."""
    rows = slice(None) if batch is None else slice(batch, batch + 1)
    return rows, slice(None), slice(*tokens)
