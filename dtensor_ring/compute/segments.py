"""Boundaries of many tiles, for kernels that take segments of different lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from dtensor_ring.compute.numbers import Numbers
from dtensor_ring.planning.values.span import length


@dataclass(frozen=True, eq=False)
class Segments:
    """Boundaries of tiles, one after the other on both sides.

    They cover all tokens of a launch. Queries that see nothing are a segment without keys,
    and keys that nobody sees are one without queries.

    Attributes:
        rows: boundaries of the queries, ascending from 0 to their number.
        cols: boundaries of the keys that they see; both have one entry more than segments.
    """

    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @cached_property
    def max_rows(self) -> int:
        """Queries of the longest segment."""
        return max(end - start for start, end in pairwise(self.rows))

    @cached_property
    def max_cols(self) -> int:
        """Keys of the longest segment."""
        return max(end - start for start, end in pairwise(self.cols))

    @cached_property
    def has_empty_rows(self) -> bool:
        """Whether there are rows without keys."""
        pairs = zip(pairwise(self.rows), pairwise(self.cols), strict=True)
        return any(length(rows) and not length(cols) for rows, cols in pairs)

    def boundaries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`rows` and `cols` as int32 tensors on the device, see `Numbers`."""
        rows, cols = self._numbers.on(device)
        return rows, cols

    @cached_property
    def _numbers(self) -> Numbers:
        return Numbers(torch.int32, self.rows, self.cols)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each segment that has both."""
        for rows, cols in zip(pairwise(self.rows), pairwise(self.cols), strict=True):
            if length(rows) and length(cols):
                yield slice(*rows), slice(*cols)
