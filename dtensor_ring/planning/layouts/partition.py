"""A sequence cut into pieces, each of one rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.layouts.layout import Layout
from dtensor_ring.planning.layouts.run import Run


class Partition(NamedTuple):
    """The pieces of a sequence, by position: arrays. Neighbours are of different ranks."""

    begins: np.ndarray
    ends: np.ndarray
    owners: np.ndarray
    """The rank that holds the piece."""

    @classmethod
    def of(cls, pieces: list[tuple[int, int, int]]) -> Partition:
        """Of begins, ends and owners, in any order; some may be empty.

        >>> Partition.of([(4, 6, 0), (0, 2, 1), (2, 4, 1), (2, 2, 0)]).ends
        array([4, 6])
        """
        filled = sorted(piece for piece in pieces if piece[0] < piece[1])
        begins, ends, owners = np.array(filled, dtype=np.int64).reshape(-1, 3).T
        is_other = owners[1:] != owners[:-1]
        first, last = (np.flatnonzero(np.insert(is_other, at, True)) for at in (0, len(is_other)))
        return (
            cls(begins[first], ends[last], owners[first]) if filled else cls(begins, ends, owners)
        )

    @classmethod
    def dealt(cls, layout: Layout, world_size: int, seq_len: int) -> Partition:
        """That of a layout whose runs are of neighbouring tokens."""
        return cls.of(
            [
                (run.start, run.start + run.length, rank)
                for rank in range(world_size)
                for run in layout.runs(rank, world_size, seq_len)
            ]
        )

    @property
    def max_runs(self) -> int:
        """The most pieces that any rank holds."""
        return int(np.bincount(self.owners, minlength=1).max())

    def runs(self, world_size: int) -> tuple[tuple[Run, ...], ...]:
        """The runs of each rank."""
        runs: list[list[Run]] = [[] for _ in range(world_size)]
        for begin, end, owner in zip(*(x.tolist() for x in self), strict=True):
            runs[owner].append(Run(begin, end - begin))
        return tuple(map(tuple, runs))
