"""Blocks dealt there and back: block j belongs to ranks 0 to W-1, then W-1 to 0, and so on.

The owner of a position depends on the position alone, whatever the length of the sequence. So
prompts that begin alike have their common blocks on the same ranks. Each rank gets one block of
every round of W.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


def nth_block(rank: int, n: int, world_size: int) -> int:
    """Number of the n-th block of a rank.

    >>> [nth_block(0, n, 2) for n in range(4)], [nth_block(1, n, 2) for n in range(4)]
    ([0, 3, 4, 7], [1, 2, 5, 6])
    """
    # Odd rounds go back, so that the last rank of one is the first of the next.
    return n * world_size + (world_size - 1 - rank if n % 2 else rank)


class Serpentine(NamedTuple):
    """How blocks of `block` tokens are dealt to `world_size` ranks.

    A rank's *columns* are its tokens in the order of their positions: the n-th block of a rank has
    the columns from `n * block` on.
    """

    block: int
    world_size: int

    def owner(self, number: int) -> int:
        """The rank that holds a block.

        >>> [Serpentine(64, 3).owner(number) for number in range(7)]
        [0, 1, 2, 2, 1, 0, 0]
        """
        n, place = divmod(number, self.world_size)
        return self.world_size - 1 - place if n % 2 else place

    def num_before(self, position: int, rank: int) -> int:
        """Columns of a rank whose positions are less than this one.

        >>> Serpentine(4, 2).num_before(10, rank=0), Serpentine(4, 2).num_before(10, rank=1)
        (4, 6)
        """
        n = position // (self.block * self.world_size)
        # All blocks of earlier rounds, and what of this round's block comes before.
        start = nth_block(rank, n, self.world_size) * self.block
        return n * self.block + min(self.block, max(0, position - start))

    def columns(self, begin: int, end: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of the positions from `begin` to `end` a rank holds, and in which columns: int64.

        >>> Serpentine(4, 2).columns(2, 14, rank=0)
        (array([ 0,  1, 10, 11]), array([2, 3, 4, 5]))
        """
        numbers, offsets = np.divmod(np.arange(begin, end), self.block)
        n, places = np.divmod(numbers, self.world_size)
        mine = np.where(n % 2, self.world_size - 1 - places, places) == rank
        return np.flatnonzero(mine), n[mine] * self.block + offsets[mine]

    def runs(self, begin: int, end: int) -> np.ndarray:
        """Start and length of the runs of each rank from `begin` to `end`, `(W, R, 2)`, int32.

        A run for each block; those that hold nothing fill the rows up.

        >>> Serpentine(4, 2).runs(2, 10).tolist()
        [[[2, 2], [12, 0]], [[4, 4], [8, 2]]]
        """
        each_round = self.block * self.world_size
        n = np.arange(begin // each_round, -(-end // each_round))
        there = np.arange(self.world_size)[:, None]
        starts = self.block * (n * self.world_size + np.where(n % 2, there[::-1], there))
        firsts, ends = np.maximum(starts, begin), np.minimum(starts + self.block, end)
        return np.stack([firsts, np.maximum(ends - firsts, 0)], axis=2).astype(np.int32)
