"""A tile's band as `window_size`, for kernels that align the diagonal bottom-right."""

from __future__ import annotations

from dtensor_ring.compute.kernels.launch import Launch
from dtensor_ring.planning.masks.mask import Mask

Window = tuple[int | None, int | None]
"""How many columns a row sees left and right of its own, `None` for all of them."""


def bottom_right(mask: Mask, rows: int, cols: int) -> Window:
    """`window_size` of a tile for a kernel that aligns the last row with the last column.

    Neither bound is negative: see Note [Windows aligned bottom-right] of `Kernel`.

    >>> bottom_right(Mask(2, 1), 9, 8), bottom_right(Mask.causal(), 7, 7)
    ((1, 2), (None, None))
    """
    if mask == Mask.causal():
        return None, None  # the causal flag says it
    left = None if mask.left is None else mask.left + cols - rows
    right = None if mask.right is None else mask.right - cols + rows
    assert left is None or right is not None or rows <= cols, f"{rows} x {cols} with {mask}"
    assert right is None or right < cols, f"{rows} x {cols} with {mask}"
    return left, right


def window_of(launch: Launch, rows: int, cols: int) -> Window:
    """`window_size` of a launch of that many rows and columns."""
    if launch.segments is None:
        return bottom_right(launch.mask, rows, cols)
    # Segments with a band are square, so both alignments of the diagonal are the same.
    mask = launch.mask
    return (None, None) if mask == Mask.causal() else (mask.left, mask.right)
