"""One call of a block kernel."""

from __future__ import annotations

from dataclasses import dataclass

from dtensor_ring.compute.memory import Region
from dtensor_ring.compute.segments import Segments
from dtensor_ring.planning.masks.mask import Mask


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of a block kernel: a tile, or segments, which are many tiles of one mask.

    Attributes:
        rows: region of the local queries `(B, N, L)`; of several batch rows with segments, all
            tokens.
        cols: region of the resident keys `(B, Nkv, C)`, likewise.
        mask: the band, in indices of the tile or of each segment.
        segments: boundaries of the tiles; `None` for a single tile.
        in_flight: whether messages are in flight meanwhile, whose kernels want multiprocessors.
    """

    rows: Region
    cols: Region
    mask: Mask
    segments: Segments | None = None
    in_flight: bool = False
