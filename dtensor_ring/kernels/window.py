"""The band of a tile, or of segments, as kernels take it that align the diagonal bottom-right."""

from __future__ import annotations

from dtensor_ring.mask import Mask
from dtensor_ring.segments import Segments

Window = tuple[int | None, int | None]
"""How many columns a row sees left and right of its own, `None` for all of them."""


def bottom_right(mask: Mask, rows: int, cols: int) -> Window:
    """The band as `window_size` of a kernel that aligns the last row with the last column.

    Note [Windows aligned bottom-right]: a trimmed tile has `rows <= cols + left` and
    `cols <= rows + right`, so neither bound can become negative, which such kernels take for
    unbounded. But flash attention 2 also takes a bound from `cols` on for unbounded, and then an
    unbounded right side for `cols` columns past the diagonal. With so many more rows than columns
    that the right side is as long, or has no bound, that hides keys from the first rows, so the
    planner cuts such tiles.
    """
    if mask == Mask.causal():
        return None, None  # the causal flag says it
    left = None if mask.left is None else mask.left + cols - rows
    right = None if mask.right is None else mask.right - cols + rows
    assert left is None or right is not None or rows <= cols, f"{rows} x {cols} with {mask}"
    assert right is None or right < cols, f"{rows} x {cols} with {mask}"
    return left, right


def segments_window(segments: Segments) -> Window:
    """The same for all segments: they are square where they have a band, so no side moves."""
    mask = segments.mask
    return (None, None) if mask == Mask.causal() else (mask.left, mask.right)
