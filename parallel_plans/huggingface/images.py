"""The images of a call, which can be cut where one ends and the next begins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor

PIXELS, GRID = "pixel_values", "image_grid_thw"
SIZES, PLACES = "image_sizes", "image_position_ids"


class Images(NamedTuple):
    """Arguments of `get_image_features`, and how large each of the images in them is."""

    given: dict[str, Any]
    sizes: tuple[int, ...]
    """Of each image: patches if the model counts them, else pixels, else 1."""
    has_grid: bool
    """Whether the patches of all images are rows of one tensor."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> Images | None:
        """Those of a call; `None` if nobody knows where they would be cut."""
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
        """The arguments for some of the images."""
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
    """Of images that are one row each."""
    sizes, places = given.get(SIZES), given.get(PLACES)
    if isinstance(sizes, Tensor):
        return tuple(sizes.prod(-1).tolist())
    if isinstance(places, Tensor):  # places of -1 are padding
        return tuple((places != -1).all(-1).sum(-1).tolist())
    return (1,) * number


def shared_out(sizes: Sequence[int], world_size: int) -> list[int]:
    """How many of the images, in their order, each rank gets, so that their sizes are even.

    An image goes to the rank in whose even share of the sum its middle lies.

    >>> shared_out([1, 1, 1], 2), shared_out([4, 1, 1, 2], 2), shared_out([5], 3)
    ([1, 2], [1, 3], [0, 1, 0])
    """
    total, counts = max(1, sum(sizes)), [0] * world_size
    for begin, end in pairwise(accumulate(sizes, initial=0)):
        counts[min(world_size - 1, (begin + end) * world_size // (2 * total))] += 1
    return counts
