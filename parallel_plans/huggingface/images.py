"""Finds the images of a call, and cuts its arguments between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor

PIXELS, GRID = "pixel_values", "image_grid_thw"
SIZES, PLACES = "image_sizes", "image_position_ids"


class Images(NamedTuple):
    """Arguments of `get_image_features`, and how large each of their images is.

    Attributes:
        given: the arguments, by name.
        sizes: size of each image, in patches if the model counts them, else in pixels, else 1.
        has_grid: whether the patches of all images are rows of one tensor.
    """

    given: dict[str, Any]
    sizes: tuple[int, ...]
    has_grid: bool

    @classmethod
    def of(cls, given: dict[str, Any]) -> Images | None:
        """Return the images of a call; `None` if it is unknown where to cut them."""
        pixels, grid = given.get(PIXELS), given.get(GRID)
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        if not isinstance(pixels, Tensor) or not pixels.numel():
            return None
        if isinstance(grid, Tensor):
            sizes = tuple(grid.prod(-1).tolist())
            is_known = set(tensors) == {PIXELS, GRID} and sum(sizes) == len(pixels)
            return cls(given, sizes, True) if is_known else None
        # Batches padded with empty images have one dim more.
        if pixels.ndim > 4 or any(len(x) != len(pixels) for x in tensors.values()):
            return None
        return cls(given, _sizes(given, len(pixels)), False)

    def part(self, begin: int, end: int) -> dict[str, Any]:
        """Return the arguments for images `begin ... end - 1`."""
        first, last = sum(self.sizes[:begin]), sum(self.sizes[:end])
        return {
            name: x
            if not isinstance(x, Tensor)
            else x[first:last]
            if self.has_grid and name == PIXELS
            else x[begin:end]
            for name, x in self.given.items()
        }


def _sizes(given: dict[str, Any], number: int) -> tuple[int, ...]:
    """Return the sizes of images that are one row each."""
    sizes, places = given.get(SIZES), given.get(PLACES)
    if isinstance(sizes, Tensor):
        return tuple(sizes.prod(-1).tolist())
    if isinstance(places, Tensor):  # -1 marks padding
        return tuple((places != -1).all(-1).sum(-1).tolist())
    return (1,) * number


def shared_out(sizes: Sequence[int], world_size: int) -> list[int]:
    """Return how many images each rank gets, in their order, to balance the sum of sizes.

    The total size is cut into equal shares, and an image goes to the rank whose share holds its
    middle.

    >>> shared_out([1, 1, 1], 2), shared_out([4, 1, 1, 2], 2), shared_out([5], 3)
    ([1, 2], [1, 3], [0, 1, 0])
    """
    total, counts = max(1, sum(sizes)), [0] * world_size
    for begin, end in pairwise(accumulate(sizes, initial=0)):
        counts[min(world_size - 1, (begin + end) * world_size // (2 * total))] += 1
    return counts
